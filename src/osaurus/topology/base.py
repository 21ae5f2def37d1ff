"""The questions a layer's memory answers: how many bytes, where it may be cut, what it
still needs. A model names one topology a layer; the cache never imports a model.

There are two kinds of memory. *Paged*: keys and values in blocks, read in place, at most one
such part a layer. *State*: float32 arrays in a slot, updated in place by every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import torch

#: Where a prefix may end for another request to resume there: at any block, or only where a
#: snapshot of the state was taken.
Cut = Literal["block", "snapshot"]
#: How to go back k tokens: forget their slots, or put a saved copy of the state back.
Rollback = Literal["forget", "restore"]

#: Bytes of one element of a state array: always float32, since rounding at each restore drifts.
STATE_ITEM_BYTES = 4


class LayerTopology(Protocol):
    """A frozen, hashable value. Layers whose paged parts are equal share a KV group."""

    @property
    def kind(self) -> str:
        """One word for people, statistics and saved records: `full_attention`, `short_conv`."""
        ...

    @property
    def tag(self) -> str:
        """Kind and geometry: two layers with equal tags can load each other's memory."""
        ...

    @property
    def paged(self) -> AttentionTopology | None:
        """What to allocate in blocks."""
        ...

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """What to allocate in a slot; names are unique within the layer."""
        ...

    @property
    def cut(self) -> Cut: ...

    @property
    def rollback(self) -> Rollback: ...

    def nbytes(self, num_tokens: int, block_tokens: int, dtype: torch.dtype) -> int:
        """Bytes one request of `num_tokens` holds in this layer; `dtype` is the blocks'."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArray:
    """One float32 array of a layer's state; its initial value is zero.

    `shape` is one slot's, at least one axis. With `tokens_per_row` r the array grows by one
    such row every r tokens: after n tokens rows [0, n // r) hold values and no other row may
    be read.
    """

    name: str
    shape: tuple[int, ...]
    tokens_per_row: int | None = None

    def shape_at(self, num_tokens: int) -> tuple[int, ...]:
        """The shape after `num_tokens`. Worked example, r = 4: 11 tokens have 2 rows."""
        if self.tokens_per_row is None:
            return self.shape
        return (num_tokens // self.tokens_per_row, *self.shape)

    def nbytes(self, num_tokens: int) -> int:
        return prod(self.shape_at(num_tokens)) * STATE_ITEM_BYTES

    @property
    def tag(self) -> str:
        grows = f"/{self.tokens_per_row}" if self.tokens_per_row else ""
        return f"{self.name}[{'x'.join(map(str, self.shape))}]{grows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTopology:
    """Keys and values of one attention layer, read in place from blocks.

    `window` None is full attention; W lets a row at position p read positions
    p - W + 1 .. p. It may be cut at any block and goes back k tokens by forgetting them.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None

    @property
    def kind(self) -> str:
        return "full_attention" if self.window is None else "sliding_window"

    @property
    def tag(self) -> str:
        window = "" if self.window is None else f",w{self.window}"
        return f"{self.kind}({self.num_kv_heads}x{self.k_dim}+{self.v_dim}{window})"

    @property
    def paged(self) -> AttentionTopology | None:
        return self

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        return ()

    @property
    def cut(self) -> Cut:
        return "block"

    @property
    def rollback(self) -> Rollback:
        return "forget"

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        """Bytes one layer needs for one block."""
        return self.num_kv_heads * block_tokens * (self.k_dim + self.v_dim) * dtype.itemsize

    def first_needed_token(self, num_tokens: int) -> int:
        """The oldest position that a row at position `num_tokens` may still read.

        Worked example, W = 4: the row at position 10 reads 7..10, so 7 is needed."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1)

    def nbytes(self, num_tokens: int, block_tokens: int, dtype: torch.dtype) -> int:
        first = self.first_needed_token(num_tokens) // block_tokens
        blocks = max(0, -(-num_tokens // block_tokens) - first)
        return blocks * self.block_bytes(block_tokens, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers of one topology: one pool, one block table a request."""

    topology: AttentionTopology
    layers: tuple[int, ...]

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        return len(self.layers) * self.topology.block_bytes(block_tokens, dtype)


def group_layers(layers: Sequence[LayerTopology]) -> tuple[KVGroup, ...]:
    """Layers by equal paged part, groups in order of first appearance; layers without one
    are in no group."""
    members: dict[AttentionTopology, list[int]] = {}
    for index, topology in enumerate(layers):
        if topology.paged is not None:
            members.setdefault(topology.paged, []).append(index)
    return tuple(KVGroup(topology=t, layers=tuple(ids)) for t, ids in members.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """A layer that keeps state: its index in the model, its kind, its arrays in order."""

    layer: int
    kind: str
    arrays: tuple[StateArray, ...]

    def nbytes(self, num_tokens: int) -> int:
        return sum(array.nbytes(num_tokens) for array in self.arrays)


def state_layers(layers: Sequence[LayerTopology]) -> tuple[StateLayer, ...]:
    """The layers that keep state, in order."""
    return tuple(
        StateLayer(layer=index, kind=topology.kind, arrays=topology.arrays)
        for index, topology in enumerate(layers)
        if topology.arrays
    )
