"""Proves that the estimate from a config is what the built network says of its own layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.runtime.geometry import read_geometry, topology_text
from parity.test_hybrid_families import VARIANTS as HYBRIDS
from parity.test_native_families import VARIANTS
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


@pytest.mark.parametrize("name", [*VARIANTS, *HYBRIDS])
def test_kinds_and_windows_are_those_of_every_native_family(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, **{**VARIANTS, **HYBRIDS}[name])
    geometry = read_geometry(json.loads((tmp_path / "config.json").read_text()))
    assert geometry is not None
    built = load_tiny(tmp_path).layers_topology
    found = [(layer.kind, layer.paged.window if layer.paged else None) for layer in built]
    assert [(layer.kind, layer.window) for layer in geometry.layers] == found


def test_patterns_that_configs_leave_out_are_the_familys() -> None:
    base = {"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
    for fields, line in (
        ({"model_type": "llama"}, "8 x full_attention"),
        (
            {"model_type": "gemma3_text", "sliding_window": 512},
            "5 x sliding_window 512, full_attention, 2 x sliding_window 512",
        ),
        (
            {"model_type": "cohere2", "sliding_window": 16},
            "2 x (3 x sliding_window 16, full_attention)",
        ),
        (
            {"model_type": "qwen3_next", "linear_num_value_heads": 4},
            "2 x (3 x gated_delta, full_attention)",
        ),
        (
            {"model_type": "lfm2", "full_attn_idxs": [2, 5]},
            "2 x (2 x short_conv, full_attention), 2 x short_conv",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M*-M"},
            "ssm, none, ssm, none, ssm, full_attention, none, ssm",
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 6,
            },
            "6 x full_attention, 2 x sliding_window 9",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 9},
            "8 x full_attention",
        ),
    ):
        geometry = read_geometry({**base, **fields})
        assert geometry is not None
        text = topology_text(geometry.layers)
        assert text == line
    assert read_geometry({"model_type": "llama"}) is None
