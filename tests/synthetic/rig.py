"""A model with its memory and nothing else: no scheduler, no cache, every row's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.cache.states import StatePool
from osaurus.kernels.paged_attention import Span, plan_decode, plan_prefill
from osaurus.models.base import ForwardBatch, GroupBatch, LayerMemory, Model
from osaurus.topology.base import group_layers, state_layers


@dataclass(slots=True, eq=False)
class Lane:
    """One sequence: its blocks, its state slot, the tokens it has absorbed."""

    tables: list[BlockTable]
    slot: int
    num_tokens: int = 0
    tokens: list[int] = field(default_factory=list)


class Rig:
    def __init__(self, model: Model, *, num_slots: int = 6, block_tokens: int = 16) -> None:
        self.model = model
        self.block_tokens = block_tokens
        layers = model.layers_topology
        groups = group_layers(layers)
        blocks = -(-model.max_context_tokens // block_tokens) * num_slots
        size = sum(group.block_bytes(block_tokens, model.kv_dtype) for group in groups)
        self.blocks = (
            BlockPool(
                groups,
                block_tokens=block_tokens,
                budget_bytes=blocks * size,
                dtype=model.kv_dtype,
            )
            if groups
            else None
        )
        self.states = StatePool(
            state_layers(layers), num_slots=num_slots, max_tokens=model.max_context_tokens
        )
        self.memory: list[LayerMemory] = []
        for layer, topology in enumerate(layers):
            group, storage = -1, torch.empty(0)
            if topology.paged is not None and self.blocks is not None:
                group, storage = self.blocks.layer_view(layer)
            state = self.states.layer_view(layer)
            self.memory.append(LayerMemory(group=group, storage=storage, state=state))

    def open(self) -> Lane:
        groups = 0 if self.blocks is None else len(self.blocks.groups)
        return Lane([BlockTable(group) for group in range(groups)], self.states.allocate())

    def close(self, lane: Lane) -> None:
        for table in lane.tables:
            assert self.blocks is not None
            table.release(self.blocks)
        self.states.release(lane.slot)

    def fork(self, lane: Lane) -> Lane:
        """A lane with the same blocks and a state of its own, in its initial value."""
        assert self.blocks is not None or not lane.tables
        tables = [table.fork(lane.num_tokens, self.blocks) for table in lane.tables if self.blocks]
        return Lane(tables, self.states.allocate(), lane.num_tokens, list(lane.tokens))

    def forget(self, lane: Lane, num_tokens: int) -> None:
        """Go back by forgetting; what lies in slots past `num_tokens` is stale."""
        lane.num_tokens = num_tokens
        del lane.tokens[num_tokens:]

    def prefill(self, lane: Lane, tokens: Sequence[int]) -> Tensor:
        """Feed one chunk; returns every row's logits."""
        return self._forward([(lane, tokens)], prefill=True)

    def decode(self, rows: Sequence[tuple[Lane, Sequence[int]]]) -> Tensor:
        """Feed some rows of several lanes as decode rows; returns every row's logits."""
        return self._forward(rows, prefill=False)

    def _forward(self, rows: Sequence[tuple[Lane, Sequence[int]]], *, prefill: bool) -> Tensor:
        starts = [0]
        ids: list[int] = []
        positions: list[int] = []
        for lane, tokens in rows:
            positions += range(lane.num_tokens, lane.num_tokens + len(tokens))
            ids += tokens
            starts.append(len(ids))
            for table in lane.tables:
                assert self.blocks is not None
                table.grow(lane.num_tokens + len(tokens), self.blocks)
        groups = [
            self._group(index, rows, starts, prefill)
            for index in range(0 if self.blocks is None else len(self.blocks.groups))
        ]
        slots = torch.tensor([lane.slot for lane, _ in rows])
        batch = ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            last_position=max(positions),
            num_small=0 if prefill else len(ids),
            q_start=tuple(starts),
            kv_len=tuple(lane.num_tokens + len(tokens) for lane, tokens in rows),
            slot_mapping=(),
            block_table=(),
            groups=tuple(groups),
            logits_rows=torch.arange(len(ids)),
            state_slot=slots if self.states.layers else None,
        )
        logits = self.model.forward(batch, self.memory).logits
        assert logits is not None
        for lane, tokens in rows:
            lane.num_tokens += len(tokens)
            lane.tokens += tokens
        return logits

    def _group(
        self,
        index: int,
        rows: Sequence[tuple[Lane, Sequence[int]]],
        starts: Sequence[int],
        prefill: bool,
    ) -> GroupBatch:
        assert self.blocks is not None
        topology, size = self.blocks.groups[index].topology, self.block_tokens
        write_rows: list[int] = []
        spans: list[Span] = []
        for (lane, tokens), start in zip(rows, starts, strict=False):
            table = lane.tables[index]
            for position in range(lane.num_tokens, lane.num_tokens + len(tokens)):
                block = table.blocks[position // size - table.first_block]
                write_rows += [
                    (block * topology.num_kv_heads + head) * size + position % size
                    for head in range(topology.num_kv_heads)
                ]
            spans.append(
                Span(
                    start=start,
                    length=len(tokens),
                    first_position=lane.num_tokens,
                    blocks=table.blocks,
                    first_block=table.first_block,
                )
            )
        written = torch.tensor(write_rows)
        if prefill:
            plan = plan_prefill(spans[0], size, topology.window, "cpu")
            return GroupBatch(write_rows=written, prefill=plan)
        return GroupBatch(
            write_rows=written, decode=plan_decode(spans, size, topology.window, "cpu")
        )
