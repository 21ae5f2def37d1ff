"""Claim: in float32, our native Llama family computes what transformers computes.

Logits are compared along the whole sequence, fed as prefill chunks and decode rows through
the engine's own runner. Answers in company and from a prefix: `test_native_families.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.engine.runner import Runner
from osaurus.engine.scheduler import RowSpan
from osaurus.topology.base import group_layers
from tiny import load_tiny, save_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": dict(family="llama"),
    "llama tied": dict(family="llama", tie_word_embeddings=True),
    "llama biased": dict(family="llama", attention_bias=True, mlp_bias=True),
    "llama head_dim": dict(family="llama", head_dim=24),
    "llama one kv head": dict(family="llama", num_key_value_heads=1),
    "llama all kv heads": dict(family="llama", num_key_value_heads=6),
    "llama linear rope": dict(
        family="llama",
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10000.0),
    ),
    "llama3 rope": dict(
        family="llama",
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama yarn": dict(
        family="llama",
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "mistral": dict(family="mistral", head_dim=16, sliding_window=None),
    "mistral window": dict(family="mistral", head_dim=16, sliding_window=40),
    "qwen2": dict(family="qwen2"),
    "qwen2 window": dict(
        family="qwen2", use_sliding_window=True, sliding_window=33, max_window_layers=1
    ),
    "qwen3": dict(family="qwen3", head_dim=16),
    "qwen3 tied": dict(family="qwen3", head_dim=32, tie_word_embeddings=True),
}


class _Sequence:
    """The part of a request that a runner looks at."""

    def __init__(self, tokens: list[int], groups: int) -> None:
        self.tokens = tokens
        self.tables = [BlockTable(group) for group in range(groups)]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def token_at(self, position: int) -> int:
        return self.tokens[position]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, **VARIANTS[variant])
    model = load_tiny(tmp_path)
    tokens = torch.randint(3, 320, (150,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]

    pool = BlockPool(
        group_layers(model.layers_topology),
        block_tokens=16,
        budget_bytes=1 << 26,
        dtype=torch.float32,
    )
    sequence: Any = _Sequence(tokens, len(pool.groups))
    runner = Runner(model, pool)
    for first, last in ((0, 37), (37, 38), (38, 102)):
        for table in sequence.tables:
            table.grow(last, pool)
        runner.prefill(RowSpan(sequence, first, last - first))
    worst = 0.0
    for position in range(102, 150):
        sequence.tokens = tokens[: position + 1]
        for table in sequence.tables:
            table.grow(position + 1, pool)
        logits = runner.decode([RowSpan(sequence, position, 1)])
        assert logits is not None
        difference = (logits[0] - expected[position]).abs().max()
        worst = max(worst, float(difference / expected[position].abs().max()))
    assert worst < 1e-3


def test_window_layers_of_a_model_get_their_own_kv_group(tmp_path: Path) -> None:
    save_tiny(tmp_path, **VARIANTS["qwen2 window"])
    groups = group_layers(load_tiny(tmp_path).layers_topology)
    assert [(g.topology.kind, g.layers) for g in groups] == [
        ("full_attention", (0,)),
        ("sliding_window", (1, 2)),
    ]
