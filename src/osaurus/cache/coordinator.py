"""One question for the engine: how much of this prompt is already known, and where.

Memory and disk are searched together: a prefix may be half in memory and half in files. What
is on disk is first read into the memory tier and then taken over like everything else. Only
the engine's thread calls this, but for `stats`.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.cache.key import ModelKey, namespace_of, policy_salt
from osaurus.cache.prefix import Entry, PrefixIndex
from osaurus.cache.runs import RUN_TOKENS, Run, copy_in, matches_pool, part_key, parts_of
from osaurus.cache.sequence import CachedSequence
from osaurus.types.cache import CacheConfig, CacheHints, CacheStats, KVMode

if TYPE_CHECKING:
    from osaurus.cache.disk import DiskStore

logger = logging.getLogger(__name__)

#: Blocks that reading from disk must save; fewer are computed sooner than opened.
MIN_DISK_BLOCKS = 2


class CacheCoordinator:
    """Finds, shares, labels and stores the blocks of one model's pool.

    `kv_mode` is the resolved one. `disk` None keeps nothing on disk, `disk_off` says why.
    """

    def __init__(
        self,
        pool: BlockPool,
        model_key: ModelKey,
        config: CacheConfig,
        *,
        kv_mode: KVMode,
        disk: DiskStore | None = None,
        disk_off: str = "",
        topology: Mapping[str, int],
    ) -> None:
        self.config = config
        self._pool = pool
        self._key = model_key
        self._kv_mode = kv_mode
        self.index = PrefixIndex(pool)
        self.disk = disk
        self._parts = parts_of(pool)
        self._serials = itertools.count(1)
        self._to_store: deque[Run] = deque()
        self._stats = CacheStats(
            model_key=str(model_key),
            budget_bytes=pool.budget_bytes,
            kv_mode=str(kv_mode),
            generated_kv="approximate" if config.reuse_generated else "not reused",
            topology=dict(topology),
            disk_off=disk_off,
        )

    @property
    def keeps_blocks(self) -> bool:
        return self.config.use_paged_cache != "off" and self.config.memory_profile != "strict"

    @property
    def is_enabled(self) -> bool:
        return self.keeps_blocks or self.disk is not None

    # A request's beginning.

    def begin(self, prompt: Sequence[int], hints: CacheHints) -> CachedSequence:
        """The request's place in the cache; salts and keys are fixed here, once."""
        if not self.is_enabled:
            return CachedSequence.off(self._pool.block_tokens)
        mode = self._kv_mode if hints.kv_mode is None else hints.kv_mode
        sequence = CachedSequence(
            namespace=namespace_of(self._key, hints, policy_salt(mode, None)),
            serial=next(self._serials),
            block_tokens=self._pool.block_tokens,
            prompt_tokens=len(prompt),
            exact_until=len(prompt) - 1,
            stable_tokens=hints.stable_tokens,
        )
        sequence.extend(prompt)
        return sequence

    def plan_restore(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Decide which records to read so that the longest prefix of `num_tokens` - 1 tokens
        can be taken over; returns their number. One token is always left to be fed."""
        sequence.record_keys.clear()
        if self.disk is None or sequence.is_off:
            return 0
        last = min((num_tokens - 1) // self._pool.block_tokens, len(sequence.digests))
        while last and sequence.is_answer(last - 1):
            last -= 1  # what the request generated itself was never written
        in_memory = self._longest(sequence, 0, last, (), self._blocks_of)
        if last - in_memory < MIN_DISK_BLOCKS:
            return 0
        on_disk = self._find_on_disk(self.disk, sequence, last)

        def both(seq: CachedSequence, index: int) -> list[int | None]:
            blocks = self._blocks_of(seq, index)
            for part, groups in enumerate(self._parts):
                if any(part_key(key, part) in on_disk for key in self._keys(seq, index)):
                    for group in groups:
                        blocks[group] = 0 if blocks[group] is None else blocks[group]
            return blocks

        length = self._longest(sequence, 0, last, (), both)
        if length - in_memory < MIN_DISK_BLOCKS:
            return 0
        for index in range(length):
            held = self._blocks_of(sequence, index)
            for part, groups in enumerate(self._parts):
                if all(held[g] is not None or index < self._needed(g, length) for g in groups):
                    continue
                for key in self._keys(sequence, index):
                    record = on_disk.get(part_key(key, part))
                    if record is not None:
                        if record not in sequence.record_keys:
                            sequence.record_keys.append(record)
                        break
        return len(sequence.record_keys)

    def _find_on_disk(
        self, disk: DiskStore, sequence: CachedSequence, last: int
    ) -> dict[bytes, str]:
        """Record by part key, for every part of the first `last` blocks that is on disk. Each
        form and part is asked for as a chain, so that few records are to be read."""
        forms = [sequence.generated_key] if self.config.reuse_generated else []
        asked = [
            part_key(key_of(index), part)
            for part in range(len(self._parts))
            for key_of in (sequence.exact_key, *forms)
            for index in range(last)
            if not sequence.is_answer(index)
        ]
        places = disk.find(sequence.namespace.hex(), asked)
        return {key: p.key for key, p in zip(asked, places, strict=True) if p is not None}

    def restore_next(self, sequence: CachedSequence) -> int:
        """Read one planned record into the memory tier; returns the tokens it covers up to.
        A record that cannot be read is counted and left out, with everything after it."""
        if self.disk is None or not sequence.record_keys:
            return 0
        record = self.disk.load(sequence.record_keys.pop(0))
        wanted = {
            part_key(key, part): (key, part)
            for index in range(len(sequence.digests))
            for key in self._keys(sequence, index)
            for part in range(len(self._parts))
        }
        if record is None:
            sequence.record_keys.clear()
            return 0
        known = [(place, wanted[b]) for place, b in enumerate(record.blocks) if b in wanted]
        part = known[0][1][1] if known else 0
        groups = self._parts[part]
        if not known or not matches_pool(record, groups, self._pool):
            self._count(restore_mismatches=1)
            self.disk.reject(record.key, "its blocks do not fit the model's cache")
            sequence.record_keys.clear()
            return 0
        places, keys = [], []
        for place, (key, _) in known:
            entry = self.index.get(key)
            if entry is None or any(entry.blocks[g] is None for g in groups):
                places.append(place)
                keys.append(key)
        counts = [len(keys) if g in groups else 0 for g in range(len(self._pool.groups))]
        if not self._pool.can_allocate(counts):
            self._count(restores_without_room=1)
            sequence.record_keys.clear()
            return 0
        blocks = {g: [self._pool.allocate(g) for _ in keys] for g in groups}
        copy_in(record, places, blocks, self._pool)
        for n in reversed(range(len(keys))):
            given: list[int | None] = [None] * len(self._pool.groups)
            for group in groups:
                given[group] = blocks[group][n]
            self.index.put(keys[n], given, maker=0, proven=True)
            for group in groups:
                self._pool.release(group, blocks[group][n])
        sequence.detail = "disk"
        sequence.read_keys.append(record.key)
        return record.end_token

    def take_over(
        self,
        sequence: CachedSequence,
        tables: Sequence[BlockTable],
        num_computed: int,
        num_tokens: int,
    ) -> int:
        """Share the longest known prefix beyond `num_computed` into the tables; returns how
        many tokens are computed now. One token is always left to be fed."""
        size = self._pool.block_tokens
        if num_computed % size or sequence.is_off:
            return num_computed
        first = num_computed // size
        last = min((num_tokens - 1) // size, len(sequence.digests))
        length = self._longest(sequence, first, last, tables, self._blocks_of)
        if length <= first:
            return num_computed
        chosen = [self._blocks_of(sequence, index) for index in range(first, length)]
        for group, table in enumerate(tables):
            begin = max(first, self._needed(group, length))
            blocks = [chosen[index - first][group] for index in range(begin, length)]
            table.adopt(begin, [block for block in blocks if block is not None], self._pool)
        for index in range(first, length):
            if self._is_generated(sequence, index):
                sequence.exact_until = min(sequence.exact_until, index * size)
                break
        sequence.labelled = max(sequence.labelled, length)
        return length * size

    def released(self, sequence: CachedSequence) -> None:
        """The request gave its blocks up and will start over: it labels anew."""
        sequence.labelled = sequence.proven = 0

    def report_lookup(self, sequence: CachedSequence, matched: int) -> None:
        """Count a request's lookup, once, with the tokens it took over at admission."""
        if sequence.is_off:
            return
        sequence.matched_tokens = matched
        if matched == 0:
            sequence.detail = "miss"
        elif sequence.detail != "disk":
            sequence.detail = "paged"
        elif self.disk is not None:
            self.disk.touch(sequence.read_keys)
        self._count(
            lookups=1,
            misses=int(matched == 0),
            memory_hits=int(sequence.detail == "paged"),
            disk_hits=int(sequence.detail == "disk"),
            hit_tokens=matched,
            prompt_tokens=sequence.prompt_tokens,
        )

    def extended(self, sequence: CachedSequence, added: int) -> None:
        """The request took over `added` more tokens, which another one computed meanwhile."""
        if sequence.matched_tokens == 0:
            self._count(misses=-1, memory_hits=1)
            sequence.detail = "paged"
        sequence.matched_tokens += added
        self._count(hit_tokens=added)

    # While it runs.

    def computed(
        self,
        sequence: CachedSequence,
        tables: Sequence[BlockTable],
        tokens: Callable[[int, int], Sequence[int]],
        num_computed: int,
    ) -> None:
        """Make blocks findable that have become full. `tokens(a, b)` gives the sequence's
        tokens [a, b). A block that was there before takes the place of an equal new one."""
        size = self._pool.block_tokens
        if sequence.is_off:
            return
        for index in range(sequence.labelled, num_computed // size):
            if index >= len(sequence.digests):
                sequence.append(tokens(index * size, (index + 1) * size))
            own: list[int | None] = [None] * len(tables)
            for group, table in enumerate(tables):
                place = index - table.first_block
                own[group] = table.blocks[place] if 0 <= place < len(table.blocks) else None
            key = sequence.own_key(index)
            kept = self.index.put(key, own, maker=sequence.serial)
            exact = key == sequence.exact_key(index)
            for group, table in enumerate(tables):
                mine, theirs = own[group], kept[group]
                if exact and mine is not None and theirs is not None and mine != theirs:
                    table.blocks[index - table.first_block] = self._pool.share(group, theirs)
                    self._pool.release(group, mine)
        sequence.labelled = max(sequence.labelled, num_computed // size)

    def prove(self, sequence: CachedSequence) -> None:
        """A token with finite logits was sampled: everything before it is finite."""
        if sequence.labelled > sequence.proven:
            self.index.prove(self._own_keys(sequence, sequence.proven))
            sequence.proven = sequence.labelled

    def reject(self, sequence: CachedSequence) -> None:
        """The request failed or its logits were not finite: nothing unproven of it stays."""
        self.index.forget(self._own_keys(sequence), unproven_only=True)

    def finished(self, sequence: CachedSequence, *, store: bool) -> None:
        """Queue the request's blocks for the disk (its tables still hold them) and drop what
        the settings do not let stay in memory."""
        if store and self.disk is not None and not sequence.is_off:
            self._queue_runs(sequence)
        if not self.keeps_blocks:
            self.index.forget(self._own_keys(sequence))

    # Storing, in small pieces between steps.

    @property
    def has_work(self) -> bool:
        return bool(self._to_store)

    @property
    def can_store(self) -> bool:
        """Whether the writer would take the next run now."""
        if not self._to_store or self.disk is None:
            return False
        return self.disk.has_room(self._to_store[0].nbytes(self._pool))

    def store_next(self) -> bool:
        """Copy one run for the writer; False when there is none or the writer is busy."""
        if not self.can_store or self.disk is None:
            return False
        run = self._to_store.popleft()
        try:
            if not self.disk.contains(run.record_key):
                self.disk.put(run.to_record(self._pool))
        finally:
            run.release(self._pool)
        return True

    def drop_pending(self) -> bool:
        """Give back the blocks that wait to be stored; False when there are none. For a pool
        that has run dry: an answer matters more than a record."""
        if not self._to_store:
            return False
        self._count(stores_dropped=len(self._to_store))
        while self._to_store:
            self._to_store.popleft().release(self._pool)
        return True

    def _queue_runs(self, sequence: CachedSequence) -> None:
        size = self._pool.block_tokens
        per_run = max(1, RUN_TOKENS // size)
        for first in range(0, sequence.labelled, per_run):
            last = min(first + per_run, sequence.labelled)
            for part, groups in enumerate(self._parts):
                found: list[tuple[bytes, list[int]]] = []
                end = first
                for index in range(first, last):
                    for key in self._keys(sequence, index):
                        entry = self.index.get(key)
                        blocks = [] if entry is None else [entry.blocks[g] for g in groups]
                        held = [block for block in blocks if block is not None]
                        if groups and len(held) == len(groups):
                            found.append((key, held))
                            end = index + 1
                            break
                if not found:
                    continue
                run = Run(
                    namespace=sequence.namespace,
                    model=self._key.name,
                    part=part,
                    first_token=first * size,
                    end_token=end * size,
                    keys=tuple(key for key, _ in found),
                    groups=groups,
                    blocks=tuple(tuple(held[n] for _, held in found) for n in range(len(groups))),
                )
                if self.disk is not None and self.disk.contains(run.record_key):
                    continue
                for group, blocks in zip(groups, run.blocks, strict=True):
                    for block in blocks:
                        self._pool.share(group, block)
                self._to_store.append(run)

    # Stats and clearing.

    def clear(self) -> None:
        """Forget every prefix of this model in memory and on disk."""
        self.drop_pending()
        self.index.clear()
        if self.disk is not None:
            try:
                self.disk.clear(model=self._key.name)
            except (OSError, sqlite3.Error):
                logger.exception("the KV cache of %s on disk was not cleared", self._key.name)

    def stats(self) -> CacheStats:
        return replace(
            self._stats,
            held_bytes=self._pool.used_bytes,
            cached_bytes=self._pool.cached_bytes,
            cached_blocks=self._pool.cached_blocks,
            evictions=self._pool.evictions,
            disk={} if self.disk is None else dict(self.disk.stats()),
        )

    def close(self) -> None:
        """Write what is queued and let go of the disk; memory goes with the pool."""
        while self._to_store and self.disk is not None:
            run = self._to_store.popleft()
            if not self.disk.contains(run.record_key):
                if not self.disk.has_room(run.nbytes(self._pool)):
                    self.disk.flush()
                self.disk.put(run.to_record(self._pool))
            run.release(self._pool)
        if self.disk is not None:
            self.disk.close()

    def _count(self, **amounts: int) -> None:
        changed = {name: getattr(self._stats, name) + n for name, n in amounts.items()}
        self._stats = replace(self._stats, **changed)

    # Which block serves an index.

    def _keys(self, sequence: CachedSequence, index: int) -> list[bytes]:
        """Keys that may serve a block, best first."""
        exact, generated = sequence.exact_key(index), sequence.generated_key(index)
        if sequence.is_answer(index):
            return [generated]
        return [exact, generated] if self.config.reuse_generated else [exact]

    def _own_keys(self, sequence: CachedSequence, first: int = 0) -> list[bytes]:
        """Keys of the blocks that the request made or took over."""
        return [key for i in range(first, sequence.labelled) for key in self._keys(sequence, i)]

    def _entries(self, sequence: CachedSequence, index: int) -> list[Entry]:
        found = [self.index.get(key) for key in self._keys(sequence, index)]
        entries = [entry for entry in found if entry is not None]
        if sequence.is_answer(index):
            # Another's keys for these tokens may come from other sums than this request's.
            return [entry for entry in entries if entry.maker == sequence.serial]
        return entries

    def _blocks_of(self, sequence: CachedSequence, index: int) -> list[int | None]:
        """The pool block of each group that can serve the index, None where there is none."""
        blocks: list[int | None] = [None] * len(self._pool.groups)
        for entry in self._entries(sequence, index):
            for group, block in enumerate(entry.blocks):
                if blocks[group] is None:
                    blocks[group] = block
        return blocks

    def _is_generated(self, sequence: CachedSequence, index: int) -> bool:
        entry = self.index.get(sequence.exact_key(index))
        return entry is None or any(entry.blocks[g] is None for g in self.index.full_groups)

    def _needed(self, group: int, length: int) -> int:
        """The first block index that a prefix of `length` blocks needs in a group."""
        size = self._pool.block_tokens
        return self._pool.groups[group].topology.first_needed_token(length * size) // size

    def _longest(
        self,
        sequence: CachedSequence,
        first: int,
        last: int,
        tables: Sequence[BlockTable],
        blocks_of: Callable[[CachedSequence, int], list[int | None]],
    ) -> int:
        """The most blocks that can be taken over: all of them in full attention, those that
        the window still needs elsewhere. `first` blocks are held in `tables` already."""
        best = first
        runs = [len(table.blocks) for table in tables] or [0] * len(self._pool.groups)
        for index in range(first, last):
            blocks = blocks_of(sequence, index)
            if any(blocks[group] is None for group in self.index.full_groups):
                break
            runs = [0 if b is None else run + 1 for b, run in zip(blocks, runs, strict=True)]
            length = index + 1
            if all(run >= length - self._needed(g, length) for g, run in enumerate(runs)):
                best = length
        return best
