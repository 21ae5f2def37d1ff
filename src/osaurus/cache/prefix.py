"""The memory tier's index: which blocks hold which prefix, and what to drop together.

An entry is one block of tokens, with one pool block in each KV group, or None where a window
has passed or the block was evicted. Blocks of full attention come and go together: a prefix
that lacks one is of no use. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from osaurus.cache.blocks import BlockPool


@dataclass(slots=True, eq=False)
class Entry:
    """`maker` is the sequence that computed it, 0 for one read from disk. `proven` is set
    once a token was sampled after it: its values are finite."""

    key: bytes
    blocks: list[int | None]
    maker: int
    proven: bool


class PrefixIndex:
    """Entries by key. Registers itself with the pool, which tells it of evictions."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[bytes, Entry] = {}
        self._owners: list[dict[int, Entry]] = [{} for _ in pool.groups]
        self.full_groups = [i for i, g in enumerate(pool.groups) if g.topology.window is None]
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def put(
        self, key: bytes, blocks: Sequence[int | None], *, maker: int, proven: bool = False
    ) -> list[int | None]:
        """Make held blocks findable. Returns, per group, the block that the index has for
        the key now: another than was given where one of the same content was there before."""
        entry = self._entries.get(key) or Entry(key, [None] * len(self._owners), maker, proven)
        for group, block in enumerate(blocks):
            if block is None or entry.blocks[group] is not None or block in self._owners[group]:
                continue
            entry.blocks[group] = block
            self._entries[key] = entry  # never without a block: nothing would evict it
            self._owners[group][block] = entry
            self._pool.keep(group, block)
        return list(entry.blocks)

    def prove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.proven = True

    def forget(
        self, keys: Iterable[bytes], *, unproven_only: bool = False, disproven: bool = False
    ) -> None:
        """Entries cease to exist; blocks that somebody holds are freed with their last hold.
        Unproven ones are zeroed then, and all if they are `disproven`."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and not (unproven_only and entry.proven):
                entry.proven = entry.proven and not disproven
                self._remove(entry)

    def forget_block(self, group: int, block: int) -> None:
        """The entry of a block, if it has one, ceases to exist."""
        entry = self._owners[group].get(block)
        if entry is not None:
            self._remove(entry)

    def clear(self) -> None:
        for entry in list(self._entries.values()):
            self._remove(entry)

    def _evicted(self, group: int, block: int) -> None:
        entry = self._owners[group][block]
        rest = [g for g, held in enumerate(entry.blocks) if held is not None and g != group]
        if rest and group not in self.full_groups:
            self._detach(entry, group, block)
        else:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        for group, block in enumerate(entry.blocks):
            if block is not None:
                self._detach(entry, group, block)
        del self._entries[entry.key]

    def _detach(self, entry: Entry, group: int, block: int) -> None:
        entry.blocks[group] = None
        del self._owners[group][block]
        self._pool.forget(group, block, clear=not entry.proven)

    def check(self) -> None:
        """Raise AssertionError unless index and pool agree on what is kept."""
        for group, owners in enumerate(self._owners):
            for block, entry in owners.items():
                assert entry.blocks[group] == block, "an owner does not own its block"
                assert self._pool.is_kept(group, block), "an entry's block is not kept"
                assert self._entries.get(entry.key) is entry, "an owner is not in the index"
