"""Which blocks and snapshots can serve a prefix: a sequence's keys against what memory has.

Looks and never changes anything. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.cache.prefix import Entry, PrefixIndex
from osaurus.cache.sequence import CachedSequence
from osaurus.cache.state_tier import StateTier

#: The block of each group that can serve a block of tokens, None where there is none.
BlocksOf = Callable[[CachedSequence, int], list[int | None]]
#: Whether state can be resumed at the end of a block of tokens.
HasSnapshot = Callable[[CachedSequence, int], bool]


class PrefixLookup:
    """`reuse_generated` also finds keys and values that decoding made."""

    def __init__(
        self, pool: BlockPool, index: PrefixIndex, states: StateTier, *, reuse_generated: bool
    ) -> None:
        self._pool = pool
        self._index = index
        self._states = states
        self._reuse_generated = reuse_generated

    def keys(self, sequence: CachedSequence, index: int) -> list[bytes]:
        """Keys that may serve a block, best first."""
        exact, generated = sequence.exact_key(index), sequence.generated_key(index)
        if sequence.is_answer(index):
            return [generated]
        return [exact, generated] if self._reuse_generated else [exact]

    def own_keys(self, sequence: CachedSequence, first: int = 0) -> list[bytes]:
        """Keys of the blocks that the request made or took over."""
        return [key for i in range(first, sequence.labelled) for key in self.keys(sequence, i)]

    def all_keys(self, sequence: CachedSequence) -> list[bytes]:
        """Keys of every block of the sequence, in either form."""
        indices = range(len(sequence.digests))
        return [
            key
            for index in indices
            for key in (sequence.exact_key(index), sequence.generated_key(index))
        ]

    def blocks_of(self, sequence: CachedSequence, index: int) -> list[int | None]:
        """The pool's blocks in memory that can serve the index."""
        blocks: list[int | None] = [None] * len(self._pool.groups)
        for entry in self._entries(sequence, index):
            for group, block in enumerate(entry.blocks):
                if blocks[group] is None:
                    blocks[group] = block
        return blocks

    def snapshot_keys(self, sequence: CachedSequence, index: int) -> list[bytes]:
        """Keys of snapshots that may serve at the end of a block, best first: decode rows
        take none, and another's prefill of an answer is not this request's."""
        return [] if sequence.is_answer(index) else self.keys(sequence, index)

    def snapshot_key(self, sequence: CachedSequence, index: int) -> bytes | None:
        """The key of the snapshot in memory that serves there."""
        keys = self.snapshot_keys(sequence, index)
        return next((key for key in keys if key in self._states.snapshots), None)

    def has_snapshot(self, sequence: CachedSequence, index: int) -> bool:
        return self.snapshot_key(sequence, index) is not None

    def is_exact(self, sequence: CachedSequence, index: int, length: int) -> bool:
        """Whether a prefix of `length` blocks takes only prefill's blocks at `index`."""
        entry = self._index.get(sequence.exact_key(index))
        return all(
            index < self.first_needed(group, length)
            or (entry is not None and entry.blocks[group] is not None)
            for group in range(len(self._pool.groups))
        )

    def first_needed(self, group: int, length: int) -> int:
        """The first block index that a prefix of `length` blocks needs in a group."""
        size = self._pool.block_tokens
        return self._pool.groups[group].topology.first_needed_token(length * size) // size

    def ends(
        self,
        sequence: CachedSequence,
        first: int,
        last: int,
        tables: Sequence[BlockTable] = (),
        blocks_of: BlocksOf | None = None,
        has_snapshot: HasSnapshot | None = None,
    ) -> Iterator[int]:
        """Lengths in blocks that can be taken over, beyond `first` and up to `last`, longest
        first. `first` blocks are held in `tables` already. With state there may be several:
        a snapshot can still turn out not to fit."""
        blocks_of = blocks_of or self.blocks_of
        if not self._states.is_used:
            length = self._longest(sequence, first, last, tables, blocks_of)
            if length > first:
                yield length
            return
        has_snapshot = has_snapshot or self.has_snapshot
        last = self._reach(sequence, first, last, blocks_of)
        for length in range(last, first, -1):
            # Asked for each: a window's blocks may be there for a longer prefix only.
            if has_snapshot(sequence, length - 1) and length == self._longest(
                sequence, first, length, tables, blocks_of
            ):
                yield length

    def _reach(self, sequence: CachedSequence, first: int, last: int, blocks_of: BlocksOf) -> int:
        """How far full attention has its blocks without a gap."""
        full = self._index.full_groups
        index = first if full else last
        while index < last and all(blocks_of(sequence, index)[group] is not None for group in full):
            index += 1
        return index

    def _longest(
        self,
        sequence: CachedSequence,
        first: int,
        last: int,
        tables: Sequence[BlockTable],
        blocks_of: BlocksOf,
    ) -> int:
        """The most blocks that can be taken over: all of them in full attention, those that
        the window still needs elsewhere."""
        best = first
        runs = [len(table.blocks) for table in tables] or [0] * len(self._pool.groups)
        for index in range(first, last):
            blocks = blocks_of(sequence, index)
            if any(blocks[group] is None for group in self._index.full_groups):
                break
            runs = [0 if b is None else run + 1 for b, run in zip(blocks, runs, strict=True)]
            length = index + 1
            if all(run >= length - self.first_needed(g, length) for g, run in enumerate(runs)):
                best = length
        return best

    def _entries(self, sequence: CachedSequence, index: int) -> list[Entry]:
        found = [self._index.get(key) for key in self.keys(sequence, index)]
        entries = [entry for entry in found if entry is not None]
        if sequence.is_answer(index):
            # Another's keys for these tokens may come from other sums than this request's.
            return [entry for entry in entries if entry.maker == sequence.serial]
        return entries
