"""One sequence through a model as the engine would run it: a prompt chunk, then decode rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.engine.runner import Runner
from osaurus.engine.scheduler import RowSpan
from osaurus.models.base import Model
from osaurus.topology.base import group_layers


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


def decode_logits(model: Model, tokens: Sequence[int], prompt: int) -> torch.Tensor:
    """[len(tokens) - prompt, V] float32: the logits of every token after the first `prompt`."""
    pool = BlockPool(
        group_layers(model.layers_topology),
        block_tokens=16,
        budget_bytes=1 << 26,
        dtype=model.kv_dtype,
    )
    runner = Runner(model, pool)
    sequence = _Sequence(list(tokens[:prompt]), len(pool.groups))
    for table in sequence.tables:
        table.grow(prompt, pool)
    runner.prefill(RowSpan(sequence, 0, prompt))  # type: ignore[arg-type]
    rows = []
    for position in range(prompt, len(tokens)):
        sequence.tokens = list(tokens[: position + 1])
        for table in sequence.tables:
            table.grow(position + 1, pool)
        logits = runner.decode([RowSpan(sequence, position, 1)])  # type: ignore[arg-type]
        assert logits is not None
        rows.append(logits[0])
    return torch.stack(rows)
