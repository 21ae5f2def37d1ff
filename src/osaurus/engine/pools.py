"""The memory of one engine: KV blocks, state slots and snapshots, out of one budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from osaurus.cache.blocks import BlockPool
from osaurus.cache.state_tier import StateTier
from osaurus.engine.memory import blocks_of_one, default_kv_budget, longest_context
from osaurus.errors import InsufficientResources
from osaurus.models.base import Model
from osaurus.topology.base import (
    AttentionTopology,
    KVGroup,
    StateLayer,
    group_layers,
    state_layers,
)
from osaurus.topology.codecs.choose import make_codec, why_exact
from osaurus.types.cache import KVMode
from osaurus.types.engine import EngineConfig

#: Share of the budget that snapshots may take at most.
SNAPSHOT_SHARE = 0.25


class Pools(NamedTuple):
    blocks: BlockPool
    states: StateTier
    max_context_tokens: int  #: the longest sequence that one request can keep in them


def build_pools(model: Model, config: EngineConfig, kv_mode: KVMode) -> Pools:
    """Reserve an engine's memory. The budget holds a state slot for each request of a full
    batch, then snapshots, then blocks; where that does not hold a whole context, the context
    is shortened. Raises `InsufficientResources` when no request fits."""
    groups, layers = group_layers(model.layers_topology), state_layers(model.layers_topology)
    limit = min(model.max_context_tokens, config.max_context_tokens or 1 << 62)
    budget = config.kv_budget_bytes
    if budget is None:
        state_bytes = _slot_bytes(layers, limit) * (
            config.max_batch_size + config.cache.recurrent_entries
        )
        budget = default_kv_budget(
            groups,
            config.kv_block_tokens,
            model.kv_dtype,
            limit,
            config.max_batch_size,
            model.device,
            state_bytes=state_bytes,
        )
    if config.kv_max_blocks is not None:
        one = sum(g.block_bytes(config.kv_block_tokens, model.kv_dtype) for g in groups)
        slots = config.max_batch_size * _slot_bytes(layers, limit)
        budget = min(budget, config.kv_max_blocks * one + slots)
    reasons = [_why_exact(kv_mode, group.topology, model) for group in groups]
    if layers:
        limit = _context_with_state(groups, layers, model, config, budget, limit)
    states = StateTier(
        layers,
        num_slots=config.max_batch_size,
        max_tokens=limit,
        block_tokens=config.kv_block_tokens,
        interval_tokens=config.cache.snapshot_interval,
        max_entries=config.cache.recurrent_entries,
        max_bytes=_snapshot_bytes(layers, config, budget, limit),
        device=model.device,
    )
    blocks = BlockPool(
        groups,
        block_tokens=config.kv_block_tokens,
        budget_bytes=budget - states.reserved_bytes,
        dtype=model.kv_dtype,
        device=model.device,
        codecs=[
            None
            if reason
            else make_codec(kv_mode, g.topology, config.kv_block_tokens, model.device)
            for g, reason in zip(groups, reasons, strict=True)
        ],
        exact_reasons=reasons,
    )
    return Pools(blocks, states, longest_context(blocks, limit, config.prefill_chunk_tokens))


def _why_exact(kv_mode: KVMode, topology: AttentionTopology, model: Model) -> str:
    reason = why_exact(kv_mode, topology)
    if not reason and not model.reads_coded_kv:
        return "the model's attention reads exact blocks only"
    return reason


def _slot_bytes(layers: Sequence[StateLayer], num_tokens: int) -> int:
    return sum(layer.nbytes(num_tokens) for layer in layers)


def _snapshot_bytes(
    layers: Sequence[StateLayer], config: EngineConfig, budget: int, num_tokens: int
) -> int:
    wanted = config.cache.recurrent_entries * _slot_bytes(layers, num_tokens)
    return min(wanted, int(SNAPSHOT_SHARE * budget))


def _context_with_state(
    groups: Sequence[KVGroup],
    layers: Sequence[StateLayer],
    model: Model,
    config: EngineConfig,
    budget: int,
    limit: int,
) -> int:
    """The most tokens up to `limit` for which all slots and one request's blocks fit: state
    that grows with its tokens takes its share of a long context in every slot."""
    size = config.kv_block_tokens

    def fits(tokens: int) -> bool:
        slots = config.max_batch_size * _slot_bytes(layers, tokens)
        counts = blocks_of_one(groups, tokens, size, config.prefill_chunk_tokens)
        blocks = sum(
            count * group.block_bytes(size, model.kv_dtype)
            for count, group in zip(counts, groups, strict=True)
        )
        return slots + _snapshot_bytes(layers, config, budget, tokens) + blocks <= budget

    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if low < 2:
        raise InsufficientResources(
            f"the KV budget of {budget} bytes does not hold {config.max_batch_size} states of "
            f"{_slot_bytes(layers, 2)} bytes and one request's blocks; raise kv_budget_bytes or "
            "lower max_batch_size"
        )
    return low
