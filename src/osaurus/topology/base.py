"""The questions a layer's memory answers: how many bytes, where it may be cut, what it
still needs. A model names one topology a layer; the cache never imports a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class LayerTopology(Protocol):
    """A frozen, hashable value. Layers with equal topologies share a KV group."""

    @property
    def kind(self) -> str: ...

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        """Bytes one layer needs for one block."""
        ...

    def first_needed_token(self, num_tokens: int) -> int:
        """The oldest position that a row at position `num_tokens` may still read."""
        ...


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

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        return self.num_kv_heads * block_tokens * (self.k_dim + self.v_dim) * dtype.itemsize

    def first_needed_token(self, num_tokens: int) -> int:
        """Worked example, W = 4: the row at position 10 reads 7..10, so 7 is needed."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers of one topology: one pool, one block table a request."""

    topology: AttentionTopology
    layers: tuple[int, ...]

    def block_bytes(self, block_tokens: int, dtype: torch.dtype) -> int:
        return len(self.layers) * self.topology.block_bytes(block_tokens, dtype)


def group_layers(layers: Sequence[AttentionTopology]) -> tuple[KVGroup, ...]:
    """Layers by equal topology, groups in order of first appearance."""
    members: dict[AttentionTopology, list[int]] = {}
    for index, topology in enumerate(layers):
        members.setdefault(topology, []).append(index)
    return tuple(KVGroup(topology=t, layers=tuple(ids)) for t, ids in members.items())
