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
from osaurus.bundle.gguf_names import ARCHITECTURES
from osaurus.bundle.gguf_reader import read_gguf
from osaurus.bundle.weights import GgufSource
from osaurus.engine.core import BatchEngine
from osaurus.models.registry import build
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, load_tiny, save_tiny, tokens_of

Tensors = dict[str, torch.Tensor]


def _gemma_norms(tensors: Tensors) -> Tensors:
    """The converter stores whole norm weights."""
    return {name: t + 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}


def _stack_experts(tensors: Tensors) -> Tensors:
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted(name for name in tensors if ".mlp.experts." in name):
        layer, _, rest = name.partition(".mlp.experts.")
        target = f"{layer}.mlp.switch_mlp.{rest.partition('.')[2]}"
        stacked.setdefault(target, []).append(tensors.pop(name))
    return {**tensors, **{name: torch.stack(parts) for name, parts in stacked.items()}}


def _flat_taps(tensors: Tensors) -> Tensors:
    """The converter leaves the middle axis of a convolution out."""
    return {
        name: t.squeeze(1) if name.endswith("conv.weight") else t for name, t in tensors.items()
    }


#: architecture -> (family and config, metadata beside the usual, change of the tensors)
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
        "rope.freq_base": 10000.0,
        **extra,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](f"{architecture}.{key}", value)
    table = ARCHITECTURES[architecture]
    names = {f"{hf}.weight": f"{ours}.weight" for ours, hf in table.model.items()}
    for layer in range(config["num_hidden_layers"]):
        for part, hf in {**table.block, **table.some_blocks}.items():
            names[f"model.layers.{layer}.{hf}.weight"] = f"blk.{layer}.{part}.weight"
    for name, tensor in change(load_file(folder / "model.safetensors")).items():
        writer.add_tensor(names[name], np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


@pytest.mark.parametrize("architecture", CASES)
def test_a_gguf_answers_as_the_model_it_was_made_from(tmp_path: Path, architecture: str) -> None:
    settings, extra, change = CASES[architecture]
    save_tiny(tmp_path, **settings)
    expected = _answer(load_tiny(tmp_path))
    path = tmp_path / "model.gguf"
    _write(path, architecture, tmp_path, extra, change)
    file = read_gguf(path)
    with closing(GgufSource([file])) as source:
        model = build(config_from_gguf(file), source, "float32")
    assert _answer(model) == expected
