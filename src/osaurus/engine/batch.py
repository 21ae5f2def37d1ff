"""A plan's row spans as the tensors of a `ForwardBatch`: packed, never padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from osaurus.cache.blocks import BlockPool
from osaurus.engine.scheduler import RowSpan
from osaurus.kernels.coded_attention import CodedPlan, plan_coded
from osaurus.kernels.paged_attention import Span, plan_decode, plan_prefill
from osaurus.models.base import ForwardBatch, GroupBatch


def build_batch(
    spans: Sequence[RowSpan],
    pool: BlockPool,
    *,
    prefill: bool,
    device: torch.device,
    with_state: bool = False,
    with_plans: bool = True,
) -> ForwardBatch:
    """Pack spans into one forward. A prefill batch holds exactly one span; a decode batch
    asks for the logits of every span that reaches its request's end. `with_state` is for
    models that have layers with state; without plans the model reads block tables by itself."""
    offsets = np.cumsum([0] + [span.count for span in spans])
    token_ids = [
        span.request.token_at(p)
        for span in spans
        for p in range(span.first, span.first + span.count)
    ]
    positions = np.concatenate([np.arange(s.first, s.first + s.count) for s in spans])
    groups = range(len(pool.groups))
    planned = groups if with_plans else range(0)
    slots = [_slots(spans, index, pool.block_tokens) for index in planned]
    rows = [
        int(offsets[i + 1]) - 1 for i, span in enumerate(spans) if not prefill and span.reaches_end
    ]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        last_position=int(positions.max()),
        num_small=0 if prefill else len(token_ids),
        q_start=tuple(int(o) for o in offsets),
        kv_len=tuple(span.first + span.count for span in spans),
        slot_mapping=tuple(torch.from_numpy(s).to(device) for s in slots),
        block_table=tuple(
            tuple(span.request.tables[index].blocks for span in spans) for index in groups
        ),
        first_block=tuple(
            tuple(span.request.tables[index].first_block for span in spans) for index in groups
        ),
        groups=tuple(
            _group_batch(spans, offsets, slots[index], index, pool, prefill, device)
            for index in planned
        ),
        logits_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        state_slot=torch.tensor([span.request.state_slot for span in spans], device=device)
        if with_state
        else None,
    )


def _slots(spans: Sequence[RowSpan], group: int, block_tokens: int) -> np.ndarray:
    """block * block_tokens + offset of every row in one group."""
    parts = []
    for span in spans:
        table = span.request.tables[group]
        positions = np.arange(span.first, span.first + span.count)
        blocks = np.asarray(table.blocks)[positions // block_tokens - table.first_block]
        parts.append(blocks * block_tokens + positions % block_tokens)
    return np.concatenate(parts)


def _group_batch(
    spans: Sequence[RowSpan],
    offsets: np.ndarray,
    slots: np.ndarray,
    index: int,
    pool: BlockPool,
    prefill: bool,
    device: torch.device,
) -> GroupBatch:
    topology, size = pool.groups[index].topology, pool.block_tokens
    heads = np.arange(topology.num_kv_heads)
    block, offset = np.divmod(slots, size)
    write_rows = (block[:, None] * topology.num_kv_heads + heads) * size + offset[:, None]
    kernel_spans = [
        Span(
            start=int(offsets[i]),
            length=span.count,
            first_position=span.first,
            blocks=span.request.tables[index].blocks,
            first_block=span.request.tables[index].first_block,
        )
        for i, span in enumerate(spans)
    ]
    written = torch.from_numpy(write_rows.reshape(-1)).to(device)
    if not prefill and pool.coded[index] is not None:
        plan = plan_coded(kernel_spans, size, device)
        if isinstance(plan, CodedPlan):
            return GroupBatch(write_rows=written, coded=plan)
        return GroupBatch(write_rows=written, decode=plan)
    if prefill:
        plan = plan_prefill(kernel_spans[0], size, topology.window, device)
        return GroupBatch(write_rows=written, prefill=plan)
    return GroupBatch(
        write_rows=written, decode=plan_decode(kernel_spans, size, topology.window, device)
    )
