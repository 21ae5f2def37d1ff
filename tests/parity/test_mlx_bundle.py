"""Claim: a bundle converted by mlx-lm gives mlx-lm's own logits.

One such bundle lies in `tests/golden/mlx/model`. Where there is a Python with mlx-lm, more are
converted on the spot: `OSAURUS_MLX_PYTHON` names it (a venv of its own, since mlx-lm pins
another transformers), else this one is tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from osaurus.bundle.weights import SafetensorsSource
from osaurus.models.loading import ComputeMode
from osaurus.models.registry import build
from osaurus.quant.linear import NativeEmbedding, QuantizedEmbedding
from replay import decode_logits

GOLDEN = Path(__file__).parents[1] / "golden" / "mlx"
#: Tokens that go in as a prompt; the logits of the others are compared.
PROMPT = 3


@cache
def mlx_python() -> str | None:
    python = os.environ.get("OSAURUS_MLX_PYTHON", sys.executable)
    probe = subprocess.run([python, "-c", "import mlx_lm"], capture_output=True, check=False)
    return python if probe.returncode == 0 else None


def check(folder: Path, mode: ComputeMode, bound: float) -> None:
    config = json.loads((folder / "config.json").read_text())
    expected = load_file(folder / "expected.safetensors")
    with closing(SafetensorsSource(folder)) as source:
        model = build(config, source, mode)
    logits = decode_logits(model, expected["tokens"].tolist(), PROMPT)
    wanted = expected["logits"][PROMPT:]
    error = (logits - wanted).norm() / wanted.norm()
    assert error < bound, error
    if mode == "float32":
        assert torch.equal(logits.argmax(dim=-1), wanted.argmax(dim=-1))


@pytest.mark.parametrize(("mode", "bound"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_golden_bundle_has_mlx_lms_logits(mode: ComputeMode, bound: float) -> None:
    check(GOLDEN / "model", mode, bound)


def test_what_is_quantized_in_the_bundle_stays_so_in_memory() -> None:
    folder = GOLDEN / "model"
    config = json.loads((folder / "config.json").read_text())
    with closing(SafetensorsSource(folder)) as source:
        model = build(config, source, "bfloat16")
    assert isinstance(model._embed, QuantizedEmbedding | NativeEmbedding)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
        ("affine", 4, 32),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    ],
    ids=lambda form: "-".join(map(str, form)),
)
def test_a_bundle_converted_now_has_mlx_lms_logits(
    tmp_path: Path, form: tuple[str, int, int]
) -> None:
    python = mlx_python()
    if python is None:
        pytest.skip("no mlx-lm here; OSAURUS_MLX_PYTHON may name a Python that has it")
    mode, bits, group = form
    subprocess.run(
        [
            python,
            str(GOLDEN / "make.py"),
            "model",
            str(tmp_path / "m"),
            str(bits),
            str(group),
            mode,
        ],
        check=True,
        capture_output=True,
    )
    check(tmp_path / "m", "float32", 1e-5)
    check(tmp_path / "m", "bfloat16", 2e-2)
