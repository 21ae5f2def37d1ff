"""Blocks in fewer bytes: the storage of one codec's blocks beside a pool's exact ones.

A coded block has one holder, the request that coded it, and an id below zero in its table
(`kernels.coded_attention.coded_id`). It is made once, from exact values, and never shared,
kept or stored: what others may take up again is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osaurus.cache.pages import PagedStorage, stretches
from osaurus.kernels.coded_attention import CodedStorage, coded_id
from osaurus.topology.base import KVGroup
from osaurus.topology.codecs.base import KVCodec


class CodedGroup:
    """One KV group's coded blocks: [layers, blocks, kv heads, bytes] uint8."""

    def __init__(
        self, group: KVGroup, codec: KVCodec, num_blocks: int, device: torch.device | str
    ) -> None:
        layers, heads = len(group.layers), group.topology.num_kv_heads
        self.codec = codec
        self.block_bytes = layers * heads * codec.block_bytes
        shape = (layers, num_blocks, heads, codec.block_bytes)
        self._pages = PagedStorage(shape, torch.uint8, device)
        self.storage = self._pages.tensor
        self._free = list(range(num_blocks - 1, -1, -1))
        self._touched = 0
        self.num_held = 0

    def layer(self, place: int) -> CodedStorage:
        """What a model reads for the group's layer at `place`."""
        return CodedStorage(self.storage[place], self.codec)

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def encode(self, exact: torch.Tensor) -> int | None:
        """Code one block of all layers; None when it has to stay exact.

        exact: [layers, kv heads, block_tokens, k + v]. Returns the id for a block table.
        """
        if not bool(self.codec.fits(exact).all()):
            return None
        block = self._free.pop()
        self._touched = max(self._touched, block + 1)
        self.storage[:, block].copy_(self.codec.encode(exact))
        self.num_held += 1
        return coded_id(block)

    def release(self, block: int) -> None:
        """block: an id that `encode` returned."""
        self._free.append(coded_id(block))
        self.num_held -= 1

    def give_back_pages(self) -> None:
        free = [block for block in self._free if block < self._touched]
        for first, last in stretches(free):
            self._pages.give_back(first, last)
        held = set(range(self._touched)).difference(free)
        self._touched = max(held, default=-1) + 1


class CodedBlocks:
    """The coded groups of a pool, by group index; groups whose blocks stay exact have none.

    `reasons[g]` says why group g stays exact.
    """

    def __init__(
        self, groups: Sequence[CodedGroup | None] = (), reasons: Sequence[str] = ()
    ) -> None:
        self.groups = tuple(groups)
        self.reasons = tuple(reasons)

    def __getitem__(self, group: int) -> CodedGroup | None:
        return self.groups[group] if group < len(self.groups) else None

    @property
    def is_used(self) -> bool:
        return any(group is not None for group in self.groups)

    @property
    def used_bytes(self) -> int:
        return sum(g.num_held * g.block_bytes for g in self.groups if g is not None)

    @property
    def num_held(self) -> int:
        return sum(g.num_held for g in self.groups if g is not None)
