"""Claim: a model written as GGUF by the `gguf` package, in the spelling its converter uses,
answers as the safetensors it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from osaurus.bundle.gguf_config import config_from_gguf
from osaurus.bundle.gguf_reader import read_gguf
from osaurus.bundle.weights import GgufSource
from osaurus.engine.core import BatchEngine
from osaurus.models.drafts import draft_tensors
from osaurus.models.registry import build
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, load_tiny, save_tiny, tokens_of
from unit.bundle.made import add_value

Tensors = dict[str, torch.Tensor]


def _gemma_norms(tensors: Tensors) -> Tensors:
    """The converter stores whole norm weights."""
    return {name: t + 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}


def _stack_experts(tensors: Tensors, of: str = "mlp") -> Tensors:
    """The experts of a layer in one tensor a projection, gate and up apart."""
    stacked: dict[str, list[torch.Tensor]] = {}
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    found = sorted(name for name in tensors if f".{of}.experts." in name)
    for name in sorted(
        found, key=lambda name: [int(p) if p.isdigit() else p for p in name.split(".")]
    ):
        layer, _, rest = name.partition(f".{of}.experts.")
        _, part, _ = rest.split(".")
        target = f"{layer}.{of}.experts.{names.get(part, part)}.weight"
        stacked.setdefault(target, []).append(tensors.pop(name))
    return {**tensors, **{name: torch.stack(parts) for name, parts in stacked.items()}}


def _flat_taps(tensors: Tensors) -> Tensors:
    """The converter leaves the middle axis of a convolution out."""
    return {
        name: t.squeeze(1) if name.endswith("conv.weight") else t for name, t in tensors.items()
    }


def _lfm2_moe(tensors: Tensors) -> Tensors:
    tensors = _flat_taps(_stack_experts(tensors, "feed_forward"))
    return {name.replace("expert_bias", "expert_bias.bias"): t for name, t in tensors.items()}


def _adjacent_pairs(tensors: Tensors) -> Tensors:
    """Rows of q and k with each rotary pair side by side, as Llama's converter has them."""
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.shape[0] // 16
            pairs = tensor.view(heads, 2, 8, -1).transpose(1, 2)
            tensors[name] = pairs.reshape(tensor.shape)
    return tensors


def _bias_with_suffix(tensors: Tensors) -> Tensors:
    old, new = "e_score_correction_bias", "e_score_correction.bias"
    return {name.replace(old, new): t for name, t in _stack_experts(tensors).items()}


def _latent_stacks(tensors: Tensors) -> Tensors:
    """Keys and values of the latent a head, keys turned; heads of 16 and 24."""
    found: Tensors = {}
    for name, tensor in _bias_with_suffix(tensors).items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        keys, values = tensor.view(6, 40, -1).split([16, 24], dim=1)
        found[name.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
        found[name.replace("kv_b", "v_b")] = values.contiguous()
    return found


#: Of the tiny delta networks: key heads, value heads a key head, the dims of both.
_K, _R, _DK, _DV = 2, 3, 8, 12


def _delta(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    for name, tensor in _stack_experts(tensors).items():
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        elif name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        elif "conv1d" in name:
            tensor = tensor.squeeze(1)
        elif name.endswith("norm.weight") and "linear_attn.norm" not in name:
            tensor = tensor + 1
        elif name.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze(0)
        if "in_proj_qkvz" in name:
            parts = tensor.view(_K, -1, tensor.shape[1]).split(
                [_DK, _DK, _R * _DV, _R * _DV], dim=1
            )
            q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
            found[name.replace("qkvz", "z")] = z
            name, tensor = name.replace("qkvz", "qkv"), torch.cat([q, k, v])
        found[name] = tensor
    return found


def _tile(tensor: torch.Tensor, width: int, dim: int = 0) -> torch.Tensor:
    """Value heads of `width` rows: the first of each key head, then the second of each."""
    heads = tensor.unflatten(dim, (_K, _R, width))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()


def _tiled_delta(tensors: Tensors) -> Tensors:
    found = _delta(tensors)
    for name, tensor in found.items():
        if "in_proj_qkv." in name or "conv1d" in name:
            keys, values = tensor.split([2 * _K * _DK, _K * _R * _DV])
            found[name] = torch.cat([keys, _tile(values, _DV)])
        elif "in_proj_z." in name:
            found[name] = _tile(tensor, _DV)
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias")):
            found[name] = _tile(tensor, 1)
        elif "linear_attn.out_proj" in name:
            found[name] = _tile(tensor, _DV, dim=1)
    return found


_DELTA: dict[str, Any] = dict(
    head_dim=32,
    num_hidden_layers=4,
    linear_num_key_heads=_K,
    linear_num_value_heads=_K * _R,
    linear_key_head_dim=_DK,
    linear_value_head_dim=_DV,
    pad_token_id=0,
)
_SSM = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": _DK,
    "ssm.group_count": _K,
    "ssm.time_step_rank": _K * _R,
    "ssm.inner_size": _K * _R * _DV,
    "full_attention_interval": 4,
    "rope.dimension_count": 8,
}
_SOFTMAX_EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
)
_EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_SIGMOID_EXPERTS: dict[str, Any] = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    n_group=4,
    topk_group=2,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
)
_SIGMOID_KEYS = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_gating_func": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
}
_LATENT: dict[str, Any] = dict(
    family="deepseek_v3",
    num_key_value_heads=6,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    **_SIGMOID_EXPERTS,
)
_LATENT_KEYS = {**_SIGMOID_KEYS, "attention.kv_lora_rank": 32, "rope.dimension_count": 8}


#: architecture, and which of its forms -> (family and config, metadata beside the usual, change
#: of the tensors)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "gemma3": (
        dict(
            family="gemma3_text",
            head_dim=32,
            num_hidden_layers=7,
            sliding_window=16,
            query_pre_attn_scalar=32,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            ),
        ),
        {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window": 16,
        },
        _gemma_norms,
    ),
    "qwen3moe": (
        dict(
            family="qwen3_moe",
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
        _stack_experts,
    ),
    "phi3": (dict(family="phi3", pad_token_id=0), {}, lambda tensors: tensors),
    "lfm2": (
        dict(
            family="lfm2",
            pad_token_id=0,
            num_hidden_layers=4,
            intermediate_size=300,
            full_attn_idxs=[1, 3],
        ),
        {
            "attention.head_count_kv": [0, 2, 0, 2],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "feed_forward_length": 256,
            "rope.freq_base": 1e6,
            "shortconv.l_cache": 3,
        },
        _flat_taps,
    ),
    "lfm2moe": (
        dict(
            family="lfm2_moe",
            pad_token_id=0,
            num_hidden_layers=4,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            num_dense_layers=1,
            **_SOFTMAX_EXPERTS,
        ),
        {
            "attention.head_count_kv": [0, 2, 0, 2],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 1e6,
            "shortconv.l_cache": 3,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            **_EXPERT_KEYS,
        },
        _lfm2_moe,
    ),
    "deepseek2": (
        dict(q_lora_rank=48, **_LATENT),
        {
            **_LATENT_KEYS,
            "attention.q_lora_rank": 48,
            "attention.head_count_kv": 1,
            "attention.key_length": 40,
            "attention.value_length": 32,
            "attention.key_length_mla": 24,
            "attention.value_length_mla": 24,
        },
        _latent_stacks,
    ),
    "deepseek2 of before": (
        dict(
            q_lora_rank=None,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=8.0,
                original_max_position_embeddings=64,
                beta_fast=32,
                beta_slow=1,
                mscale=0.8,
                mscale_all_dim=0.8,
            ),
            **_LATENT,
        ),
        {
            **_LATENT_KEYS,
            "attention.key_length": 24,
            "attention.value_length": 24,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.08,
        },
        _bias_with_suffix,
    ),
    "glm4": (
        dict(family="glm4", head_dim=16, pad_token_id=0, attention_bias=True),
        {"rope.dimension_count": 8},
        lambda tensors: tensors,
    ),
    "glm4moe": (
        dict(
            family="glm4_moe",
            head_dim=16,
            use_qk_norm=True,
            attention_bias=True,
            **_SIGMOID_EXPERTS,
        ),
        {**_SIGMOID_KEYS, "rope.dimension_count": 8},
        _bias_with_suffix,
    ),
    "qwen3next": (
        dict(
            family="qwen3_next",
            shared_expert_intermediate_size=48,
            decoder_sparse_step=1,
            **_DELTA,
            **_SOFTMAX_EXPERTS,
        ),
        {**_SSM, **_EXPERT_KEYS, "expert_shared_feed_forward_length": 48},
        _delta,
    ),
    "qwen35": (dict(family="qwen3_5_text", **_DELTA), _SSM, _tiled_delta),
    "qwen35moe": (
        dict(
            family="qwen3_5_moe_text",
            shared_expert_intermediate_size=48,
            **_DELTA,
            **_SOFTMAX_EXPERTS,
        ),
        {**_SSM, **_EXPERT_KEYS, "expert_shared_feed_forward_length": 48},
        _tiled_delta,
    ),
    "olmo2": (dict(family="olmo2", pad_token_id=0), {}, lambda tensors: tensors),
    "olmo2 with windows": (
        dict(family="olmo3", pad_token_id=0, num_hidden_layers=4, sliding_window=24),
        {
            "attention.sliding_window": 24,
            "attention.sliding_window_pattern": [True, True, True, False],
        },
        lambda tensors: tensors,
    ),
    "smollm3": (
        dict(family="smollm3", pad_token_id=0, num_hidden_layers=5),
        {},
        _adjacent_pairs,
    ),
    "ernie4_5": (dict(family="ernie4_5", pad_token_id=0), {}, lambda tensors: tensors),
    "cohere2": (
        dict(
            family="cohere2",
            pad_token_id=0,
            num_hidden_layers=5,
            sliding_window=24,
            logit_scale=0.25,
        ),
        {
            "attention.sliding_window": 24,
            "attention.layer_norm_epsilon": 1e-5,
            "logit_scale": 0.25,
        },
        lambda tensors: tensors,
    ),
}


def _write(path: Path, architecture: str, folder: Path, extra: dict[str, Any], change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    metadata: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "rope.freq_base": _theta(config),
        **extra,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            add_value(writer, f"{architecture}.{key}", value)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    # The converter's own map from published names.
    names = gguf.get_tensor_name_map(kinds[architecture], metadata["block_count"])
    tied = config.get("tie_word_embeddings")
    for name, tensor in change(load_file(folder / "model.safetensors")).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if not (tied and target == "output.weight"):
            writer.add_tensor(target, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _answer(model: Any) -> list[int]:
    engine = BatchEngine(
        model,
        EngineConfig(kv_block_tokens=8, kv_budget_bytes=1 << 24),
        token_bytes=TokenText().token_bytes,
        start=False,
    )
    (stream,) = engine.generate(ask("r", list(range(3, 60)), max_tokens=24))
    while not stream._mailbox.completed:  # type: ignore[attr-defined]
        engine.step()
    engine.shutdown()
    return tokens_of(list(stream))


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_answers_as_the_model_it_was_made_from(tmp_path: Path, case: str) -> None:
    settings, extra, change = CASES[case]
    architecture = case.partition(" ")[0]
    save_tiny(tmp_path, **settings)
    expected = _answer(load_tiny(tmp_path))
    path = tmp_path / "model.gguf"
    _write(path, architecture, tmp_path, extra, change)
    file = read_gguf(path)
    with closing(GgufSource([file])) as source:
        model = build(config_from_gguf(file), source, "float32")
    assert _answer(model) == expected


def test_draft_layers_of_a_gguf_are_left_and_listed(tmp_path: Path) -> None:
    settings, extra, change = CASES["glm4moe"]
    save_tiny(tmp_path, **settings)
    expected = _answer(load_tiny(tmp_path))

    def with_draft(tensors: Tensors) -> Tensors:
        return {**change(tensors), "model.layers.3.eh_proj.weight": torch.ones(2, 2)}

    path = tmp_path / "model.gguf"
    more = {**extra, "block_count": 4, "nextn_predict_layers": 1}
    _write(path, "glm4moe", tmp_path, more, with_draft)
    file = read_gguf(path)
    config = config_from_gguf(file)
    with closing(GgufSource([file])) as source:
        assert draft_tensors(config, source.names()) == {
            "layers.0.eh_proj.weight": "model.layers.3.eh_proj.weight"
        }
        assert _answer(build(config, source, "float32")) == expected
