"""Claim: MLX's own quantized matrices are read to the values that MLX dequantizes them to.

`tests/golden/mlx` was written by MLX (`make.py` there); that a whole model converted by mlx-lm
answers the same is claimed in `tests/parity/test_mlx_bundle.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from osaurus.errors import UnsupportedBundle
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.mlx import Mlx
from osaurus.quant.schemes import read_schemes

GOLDEN = load_file(Path(__file__).parents[2] / "golden" / "mlx" / "matrices.safetensors")
FORMS = sorted({name.rpartition(".")[0] for name in GOLDEN})


def parts_of(form: str) -> dict[str, torch.Tensor]:
    found = {
        name.rpartition(".")[2]: tensor
        for name, tensor in GOLDEN.items()
        if name.rpartition(".")[0] == form
    }
    found["weight"] = found["weight"].view(torch.int32)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_values_are_those_that_mlx_dequantizes_to(form: str) -> None:
    mode, bits, group = form.split("-")
    scheme = Mlx.from_config({"mode": mode, "bits": int(bits), "group_size": int(group)})
    parts = parts_of(form)
    wanted = parts.pop("dequantized")
    assert set(parts) == {n for n, part in scheme.parts(2, 128).items() if not part.optional}
    for name, part in scheme.parts(2, 128).items():
        if not part.optional:
            assert tuple(parts[name].shape) in part.shapes
    weight = scheme.decode(parts, (2, 128))
    if isinstance(weight, GroupedWeight):
        assert int(weight.codes.max()) < 1 << weight.bits
        weight = weight.dequantize(torch.float32)
    tolerance = 0.0 if mode != "affine" else 1e-6
    torch.testing.assert_close(weight.float(), wanted, rtol=tolerance, atol=tolerance)


def test_a_global_scale_of_nvfp4_is_the_largest_magnitude() -> None:
    parts = parts_of("nvfp4-4-16")
    wanted = parts.pop("dequantized") * 3
    parts["global_scale"] = torch.tensor(3 * 6 * 448.0)
    weight = Mlx.from_config({"mode": "nvfp4"}).decode(parts, (2, 128))
    assert isinstance(weight, GroupedWeight)
    torch.testing.assert_close(weight.dequantize(torch.float32), wanted)


def test_modules_have_entries_of_their_own() -> None:
    entry = {
        "group_size": 64,
        "bits": 4,
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8},
        "model.layers.0.mlp.up_proj": False,
        "model.layers.1.mlp.up_proj": {"mode": "mxfp4"},
        "lm_head": {"bits": 6},
        "model.embed_tokens": True,
    }
    for key in ("quantization", "quantization_config"):
        schemes = read_schemes({key: entry})
        assert schemes.of("model.layers.3.mlp.up_proj") == Mlx("affine", 4, 64)
        assert schemes.of("model.embed_tokens") == Mlx("affine", 4, 64)
        assert schemes.of("model.layers.0.mlp.down_proj") == Mlx("affine", 8, 32)
        assert schemes.of("model.layers.0.mlp.up_proj") is None
        assert schemes.of("model.layers.1.mlp.up_proj") == Mlx("mxfp4", 4, 32)
        assert schemes.of("lm_head") == Mlx("affine", 6, 64)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"group_size": 48, "bits": 4}, "group_size 48"),
        ({"group_size": 64, "bits": 7}, "bits 7"),
        ({"group_size": 64, "bits": "4"}, "bits '4'"),
        ({"mode": "fp2"}, "'fp2'"),
        ({"mode": "mxfp4", "group_size": 64}, "group_size 64"),
        ("4bit", "no JSON object"),
    ],
)
def test_what_mlx_does_not_have_is_refused_by_name(entry: object, words: str) -> None:
    with pytest.raises(UnsupportedBundle, match=words):
        read_schemes({"quantization": entry})
