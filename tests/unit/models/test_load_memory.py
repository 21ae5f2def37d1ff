"""Claim: a load takes at most 15 % or 200 MB more than it keeps, and the file's pages are not kept
beside the weights: for the default model, and for experts of the transformers route, whether a
bundle has them one by one or stacked under a name of its own, plain or quantized as they come.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import osaurus
from osaurus.bundle.bundle import Bundle
from unit.bundle.made import byte_level_tokenizer

#: Peak and remaining resident bytes; the peak is the kernel's own, cleared before the load.
PROGRAM = """
import gc, json, re, sys
from pathlib import Path
import torch
from osaurus.bundle.bundle import open_bundle
from osaurus.kernels.heap import trim_heap
from osaurus.models.registry import load_model
import osaurus.models.llama

def status(name):
    found = re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024

bundle = open_bundle(sys.argv[1], "default")
if bundle.config["model_type"] != "llama":
    import osaurus.models.transformers_route, transformers
    config = transformers.CONFIG_MAPPING[bundle.config["model_type"]]
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]
torch.randn(64, 64) @ torch.randn(64, 64)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model = load_model(bundle, compute_mode="bfloat16", on_load=sys.argv[2] or None)
peak = status("VmHWM")
gc.collect()
trim_heap()
print(json.dumps(dict(before=before, peak=peak, after=status("VmRSS"), weights=model.nbytes)))
"""


def _figures(path: Path, quantize: str = "") -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), quantize],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(osaurus.__file__).parents[1])},
    )
    return json.loads(done.stdout)


def _check(figures: dict[str, int]) -> None:
    after, peak = figures["after"], figures["peak"]
    assert peak <= after + max(0.15 * after, 200e6), figures


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"
)


@pytest.mark.slow
@needs_proc
def test_the_peak_of_a_load_is_bounded(default_bundle: Bundle) -> None:
    figures = _figures(default_bundle.path)
    _check(figures)
    # Not the weights and the file: some megabytes are the tables of both.
    assert figures["after"] - figures["before"] < figures["weights"] + 40e6, figures


#: Of what it stores, what a load may keep at most.
SHARES = {"": 1.05, "int8": 0.65, "int4": 0.45}


def _values(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights for a model of a config by the names that transformers has for them."""
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in skeleton.state_dict().items():
        value = torch.full(parameter.shape, 0.02, dtype=torch.bfloat16)
        value.view(-1)[::7] = -0.03
        yield name, value


def _load_saved(path: Path, config: Any, tensors: dict[str, torch.Tensor], quantize: str) -> None:
    """Save a bundle, load it and check what that takes."""
    config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors")
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    stored = (path / "model.safetensors").stat().st_size
    tensors.clear()
    figures = _figures(path, quantize)
    _check(figures)
    assert figures["weights"] < SHARES[quantize] * stored, figures


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_experts_that_are_quantized_as_they_come_are_never_whole(
    tmp_path: Path, quantize: str
) -> None:
    """About 400 M weights: 800 MB in the file, a third to a half of it afterwards."""
    config = transformers.AutoConfig.for_model(
        "minimax_m2",
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, value in _values(config):
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = value
            continue
        layer = name.rpartition(".mlp.")[0]
        for expert, matrix in enumerate(value):
            parts = (
                zip(("w1", "w3"), matrix.chunk(2), strict=True)
                if "gate" in name
                else [("w2", matrix)]
            )
            for part, piece in parts:
                path = f"{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
                tensors[path] = piece.contiguous()
    tensors = {
        name.replace(".mlp.gate.", ".block_sparse_moe.gate.").replace(
            ".mlp.e_score", ".block_sparse_moe.e_score"
        ): tensor
        for name, tensor in tensors.items()
    }
    _load_saved(tmp_path, config, tensors, quantize)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("quantize", ["", "int8", "int4"])
def test_stacks_of_experts_that_transformers_renames_are_never_whole(
    tmp_path: Path, quantize: str
) -> None:
    """About 430 M weights of a Granite hybrid, 870 MB in the file."""
    config = transformers.AutoConfig.for_model(
        "granitemoehybrid",
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        shared_intermediate_size=1024,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=32,
        num_experts_per_tok=2,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_d_state=64,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    stored = {
        ".experts.gate_up_proj": ".input_linear.weight",
        ".experts.down_proj": ".output_linear.weight",
        ".router.weight": ".router.layer.weight",
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, value in _values(config):
        for own, other in stored.items():
            name = name.replace(f"block_sparse_moe{own}", f"block_sparse_moe{other}")
        tensors[name] = value
    assert any(name.endswith(".input_linear.weight") for name in tensors)
    _load_saved(tmp_path, config, tensors, quantize)
