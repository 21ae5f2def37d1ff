"""What a model is to the engine: packed rows in, logits for chosen rows out.

A step's rows lie one after another without padding. Decode and verify rows come first
(`num_small` of them), then prefill rows. The engine mixes both in one forward only for a model
that reads block tables by itself and counts all of them as small; elsewhere they must not share
a product. Static shapes are the runner's affair, not a model's.

Letters: T rows, S slots, L logits rows, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from osaurus.kernels.coded_attention import CodedPlan, CodedStorage
from osaurus.kernels.paged_attention import DecodePlan, PrefillPlan
from osaurus.topology.base import LayerTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """One KV group's part of a step, built once for all its layers.

    `write_rows` says where the step's keys and values go: for row t and kv head h the flat
    index (block * heads + h) * block_tokens + offset. Exactly one plan is set;
    `coded` only for groups whose `LayerMemory.coded` is.
    """

    write_rows: Tensor  # [T * kv heads] int64
    decode: DecodePlan | None = None
    prefill: PrefillPlan | None = None
    coded: CodedPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One forward's rows. Host values are tuples; tensors are on the model's device.

    `slot_mapping[g][t]` is block * block_tokens + offset of row t in group g;
    `block_table[g][s]` the blocks of slot s from its `first_block[g][s]` on. Layers with state
    update the state in slot `state_slot[s]` in place, by each of the rows in order; the tensor is
    given exactly when the model has such layers. `state_staging` is for drafted rows, whose
    state may have to be taken back. `taps` names layers whose output hidden
    states are wanted; the number of layers names what the last norm makes of the last layer's.
    `embeds`, when given, replaces the embedding of `token_ids`.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, or [3, T] for multi-axis rotary
    last_position: int
    num_small: int
    q_start: tuple[int, ...]  # S + 1 row offsets
    kv_len: tuple[int, ...]  # S, tokens of each slot including this step's rows
    slot_mapping: tuple[Tensor, ...]  # per group [T] int64
    block_table: tuple[tuple[Sequence[int], ...], ...]  # per group, per slot
    groups: tuple[GroupBatch, ...]
    logits_rows: Tensor  # [L] int64
    first_block: tuple[tuple[int, ...], ...] = ()  # per group, per slot
    state_slot: Tensor | None = None  # [S] int64
    state_staging: Tensor | None = None  # [S] int64
    taps: tuple[int, ...] = ()
    embeds: Tensor | None = None  # [T, C] float32

    @property
    def num_rows(self) -> int:
        return self.q_start[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Where one layer's memory lies: keys and values in blocks, state in slots.

    `group` is -1 and `storage` empty in a layer without keys and values; `state` is empty in
    one without state, else has one [slots, *shape] float32 tensor for each array of its
    topology, in order. Rows of a growing array past its valid ones hold anything, also NaN.
    """

    group: int
    storage: Tensor  # [blocks, kv heads, block_tokens, k_dim + v_dim]
    state: tuple[Tensor, ...] = ()
    coded: CodedStorage | None = None  # None where every block is exact


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """`logits` [L, V] float32, None when no row asked for them; `taps` by layer index."""

    logits: Tensor | None
    taps: Mapping[int, Tensor] = field(default_factory=dict)


class Model(Protocol):
    """A loaded network. Holds weights, never requests; only the engine's thread calls it."""

    vocab_size: int
    max_context_tokens: int
    kv_dtype: torch.dtype
    device: torch.device
    #: Its attention follows coded plans (`GroupBatch.coded`) in layers of full attention.
    reads_coded_kv: bool

    @property
    def layers_topology(self) -> tuple[LayerTopology, ...]:
        """What each layer remembers, in order."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of weights resident."""
        ...

    def reads_block_tables(self, kv: Sequence[LayerMemory], *, prefill: bool) -> bool:
        """Whether its batches over that memory shall come without plans of attention, with
        block tables only."""
        ...

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> ForwardOutput:
        """Run one packed batch: write its keys and values, update its state, return logits
        for its `logits_rows`. Mutates only the slots named by the batch. `kv[i]` is layer i's."""
        ...
