"""Proves that the estimate from a config is what the built network says of its own layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.runtime.geometry import read_geometry
from tiny import load_tiny, save_tiny

_LATENT = dict(
    num_key_value_heads=6, q_lora_rank=32, kv_lora_rank=24, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
    n_group=1, topk_group=1, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 40},
    "gemma3_text": {"head_dim": 16, "sliding_window": 40, "num_hidden_layers": 7},
    "deepseek_v3": _LATENT,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
}


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("num_tokens", [32, 512])
def test_bytes_of_a_request_are_those_of_the_layers(
    family: str, num_tokens: int, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **_FAMILIES[family])
    geometry = read_geometry(json.loads((tmp_path / "config.json").read_text()))
    assert geometry is not None
    layers = load_tiny(tmp_path).layers_topology
    paged = [layer.paged for layer in layers if layer.paged is not None]
    exact = sum(one.nbytes(num_tokens, 1, torch.bfloat16) for one in paged)
    # A window's oldest token is the row that is being written: one less is ever read back.
    assert exact <= geometry.kv_bytes(num_tokens, 2) <= 1.03 * exact
    state = sum(array.nbytes(num_tokens) for layer in layers for array in layer.arrays)
    assert geometry.state_bytes == pytest.approx(state, rel=0.6)
    assert (geometry.state_bytes > 0) == (state > 0)
