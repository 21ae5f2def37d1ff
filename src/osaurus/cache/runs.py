"""Blocks as records on disk and back: a run is up to 256 tokens of one part of a prefix.

Layers of full attention form part 0 and lie in one record; each sliding-window group is a
part of its own, since its blocks are there for the end of a prefix only. Damage to one record
costs what follows it, in its part.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from osaurus.cache.blocks import BlockPool
from osaurus.cache.key import framed_digest

if TYPE_CHECKING:
    from osaurus.cache.records import Record

#: Tokens of one record.
RUN_TOKENS = 256


def part_key(key: bytes, part: int) -> bytes:
    """The key of one part of a block of tokens; part 0 has the block's own."""
    return key if part == 0 else framed_digest("part1", key, struct.pack("<q", part))


def parts_of(pool: BlockPool) -> tuple[tuple[int, ...], ...]:
    """The pool's groups by part; part 0 is empty for a model without full attention."""
    full = tuple(i for i, group in enumerate(pool.groups) if group.topology.window is None)
    windows = [(i,) for i, group in enumerate(pool.groups) if group.topology.window is not None]
    return (full, *windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks to be written as one record, each held by whoever queued it.

    `blocks[g]` lies in group `groups[g]`, one for each of `keys`. `parent` is the part key of
    the block before the first, empty for none.
    """

    namespace: bytes
    model: str
    part: int
    first_token: int
    end_token: int
    parent: bytes
    keys: tuple[bytes, ...]
    groups: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]

    @property
    def record_key(self) -> str:
        """By both ends: a run that begins later is another record."""
        ends = (part_key(self.keys[0], self.part), part_key(self.keys[-1], self.part))
        return framed_digest("run1", *ends).hex()[:32]

    def nbytes(self, pool: BlockPool) -> int:
        return sum(pool.block_bytes[g] for g in self.groups) * len(self.keys)

    def to_record(self, pool: BlockPool) -> Record:
        """Copies the blocks to the host: the pool's go on living without it."""
        from osaurus.cache.records import Record

        tensors: dict[str, Tensor] = {}
        for group, blocks in zip(self.groups, self.blocks, strict=True):
            copy = pool.read_blocks(group, blocks)
            tensors[f"group{group}"] = copy
        return Record(
            key=self.record_key,
            namespace=self.namespace.hex(),
            model=self.model,
            kind="run",
            first_token=self.first_token,
            end_token=self.end_token,
            blocks=tuple(part_key(key, self.part) for key in self.keys),
            parent=self.parent,
            tensors=tensors,
            meta={"kinds": _kinds(pool, self.groups), "block_tokens": str(pool.block_tokens)},
        )

    def release(self, pool: BlockPool) -> None:
        for group, blocks in zip(self.groups, self.blocks, strict=True):
            for block in reversed(blocks):
                pool.release(group, block)


def matches_pool(record: Record, groups: Sequence[int], pool: BlockPool) -> bool:
    """Whether a record's blocks fit the live storage: kinds, dtypes and shapes, no casts."""
    if record.kind != "run" or record.meta.get("kinds") != _kinds(pool, groups):
        return False
    for group in groups:
        tensor, storage = record.tensors.get(f"group{group}"), pool.storage[group]
        if tensor is None or tensor.dtype != storage.dtype or tensor.dim() != storage.dim():
            return False
        if tensor.shape[0] != storage.shape[0] or tensor.shape[2:] != storage.shape[2:]:
            return False
        if tensor.shape[1] != len(record.blocks):
            return False
    return len(record.tensors) == len(groups)


def copy_in(
    record: Record,
    places: Sequence[int],
    group_blocks: Mapping[int, Sequence[int]],
    pool: BlockPool,
) -> None:
    """Copy the record's blocks at `places` into the pool's blocks of each group."""
    for group, blocks in group_blocks.items():
        tensor = record.tensors[f"group{group}"]
        pool.write_blocks(group, blocks, tensor, places)


def _kinds(pool: BlockPool, groups: Sequence[int]) -> str:
    return ",".join(
        f"{group}:{pool.groups[group].topology.kind}:{len(pool.groups[group].layers)}"
        for group in groups
    )
