"""Prefixes back from disk: which records to read, and each of them into the memory tier.

A record that cannot be read, or does not fit, costs what follows it and never a request.
Only the engine's thread calls this; files are read on another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from osaurus.cache.blocks import BlockPool
from osaurus.cache.key import snapshot_digest
from osaurus.cache.lookup import PrefixLookup
from osaurus.cache.prefix import PrefixIndex
from osaurus.cache.runs import copy_in, matches_pool, part_key, parts_of
from osaurus.cache.sequence import CachedSequence
from osaurus.cache.snapshots import Snapshot
from osaurus.cache.state_tier import StateTier

if TYPE_CHECKING:
    from osaurus.cache.disk import DiskStore
    from osaurus.cache.records import Record

#: Blocks that reading from disk must save; fewer are computed sooner than opened.
MIN_DISK_BLOCKS = 2
#: A record that takes longer is computed instead.
READ_TIMEOUT_S = 10.0


class DiskRestore:
    """`count` adds to the cache's counters by name."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        states: StateTier,
        lookup: PrefixLookup,
        disk: DiskStore,
        count: Callable[..., None],
    ) -> None:
        self._pool = pool
        self._index = index
        self._states = states
        self._lookup = lookup
        self._disk = disk
        self._count = count
        self._parts = parts_of(pool)
        # A thread of its own: a slow disk must not hold up the streams that run.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-reader")

    def plan(self, sequence: CachedSequence, last: int) -> None:
        """Set `record_keys` to what is to be read so that the longest prefix of at most `last`
        blocks can be taken over from memory; to nothing where reading would not pay."""
        sequence.record_keys.clear()
        while last and sequence.is_answer(last - 1):
            last -= 1  # what the request generated itself was never written
        in_memory = next(self._lookup.ends(sequence, 0, last), 0)
        if last - in_memory < MIN_DISK_BLOCKS:
            return
        on_disk = self._find_runs(sequence, last)
        snapshots = self._find_snapshots(sequence, last) if self._states.is_used else {}

        def both(seq: CachedSequence, index: int) -> list[int | None]:
            blocks = self._lookup.blocks_of(seq, index)
            for part, groups in enumerate(self._parts):
                if any(part_key(key, part) in on_disk for key in self._lookup.keys(seq, index)):
                    for group in groups:
                        blocks[group] = 0 if blocks[group] is None else blocks[group]
            return blocks

        def either(seq: CachedSequence, index: int) -> bool:
            return index in snapshots or self._lookup.has_snapshot(seq, index)

        ends = self._lookup.ends(sequence, 0, last, blocks_of=both, has_snapshot=either)
        length = next(ends, 0)
        if length - in_memory < MIN_DISK_BLOCKS:
            return
        self._choose_runs(sequence, length, on_disk)
        if self._states.is_used and not self._lookup.has_snapshot(sequence, length - 1):
            sequence.record_keys.append(snapshots[length - 1])

    def _find_runs(self, sequence: CachedSequence, last: int) -> dict[bytes, str]:
        """Record by part key, for every part of the first `last` blocks that is on disk. Each
        form and part is asked for as a chain, so that few records are to be read."""
        keys = [self._lookup.keys(sequence, index) for index in range(last)]
        forms = max(map(len, keys), default=0)
        asked = [
            part_key(of_block[form], part)
            for part in range(len(self._parts))
            for form in range(forms)
            for of_block in keys
        ]
        places = self._disk.find(sequence.namespace.hex(), asked)
        return {key: p.key for key, p in zip(asked, places, strict=True) if p is not None}

    def _find_snapshots(self, sequence: CachedSequence, last: int) -> dict[int, str]:
        """Record by block index, for every snapshot of the first `last` blocks on disk."""
        asked = [
            (index, snapshot_digest(key))
            for index in range(last)
            for key in reversed(self._lookup.snapshot_keys(sequence, index))
        ]
        found = self._disk.find_snapshots(sequence.namespace.hex(), [key for _, key in asked])
        return {index: key for (index, _), key in zip(asked, found, strict=True) if key}

    def _choose_runs(
        self, sequence: CachedSequence, length: int, on_disk: dict[bytes, str]
    ) -> None:
        """Add the runs that a prefix of `length` blocks needs and memory lacks."""
        chosen = sequence.record_keys
        for index in range(length):
            held = self._lookup.blocks_of(sequence, index)
            for part, groups in enumerate(self._parts):
                if all(
                    held[group] is not None or index < self._lookup.first_needed(group, length)
                    for group in groups
                ):
                    continue
                for key in self._lookup.keys(sequence, index):
                    record = on_disk.get(part_key(key, part))
                    if record is not None:
                        if record not in chosen:
                            chosen.append(record)
                        break

    def read_next(self, sequence: CachedSequence, wait_s: float) -> int | None:
        """Bring one planned record into the memory tier; returns the tokens it covers up to,
        None while it is still being read, for which this waits at most `wait_s`. A record that
        cannot be read is counted and left out, with everything after it."""
        reading = sequence.reading or self._start(sequence)
        wait([reading], timeout=wait_s)
        if not reading.done():
            if time.monotonic() - sequence.reading_since < READ_TIMEOUT_S:
                return None
            self._count(restores_given_up=1)
            sequence.record_keys.clear()
            sequence.reading = None
            return 0
        sequence.record_keys.pop(0)
        sequence.reading = None
        if sequence.record_keys:
            self._start(sequence)  # the next is read while this one is copied
        record = reading.result()
        taken = record is not None and (
            self._take_run(sequence, record)
            if record.kind == "run"
            else self._take_snapshot(sequence, record)
        )
        if record is None or not taken:
            sequence.record_keys.clear()
            sequence.reading = None
            return 0
        sequence.detail = "disk"
        sequence.read_keys.append(record.key)
        return record.end_token

    def _start(self, sequence: CachedSequence) -> Future[Record | None]:
        reading = self._reader.submit(self._disk.load, sequence.record_keys[0])
        sequence.reading, sequence.reading_since = reading, time.monotonic()
        return reading

    def close(self) -> None:
        """Begin no more reads; does not wait for one that hangs."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def reject(self, sequence: CachedSequence) -> None:
        """Put aside every record that holds a block or snapshot of the sequence."""
        keys = self._lookup.all_keys(sequence)
        asked = [part_key(key, part) for key in keys for part in range(len(self._parts))]
        runs = self._disk.find(sequence.namespace.hex(), asked)
        records = {place.key for place in runs if place is not None}
        if self._states.is_used:
            snapshots = [snapshot_digest(key) for key in keys]
            found = self._disk.find_snapshots(sequence.namespace.hex(), snapshots)
            records |= {key for key in found if key}
        for key in records:
            self._disk.reject(key, "a prompt that read it had logits that were not finite")

    def _take_run(self, sequence: CachedSequence, record: Record) -> bool:
        # A record says which tokens it covers; their keys are looked up, no others.
        size = self._pool.block_tokens
        covered = range(
            record.first_token // size, min(record.end_token // size, len(sequence.digests))
        )
        wanted = {
            part_key(key, part): (key, part)
            for index in covered
            for key in self._lookup.keys(sequence, index)
            for part in range(len(self._parts))
        }
        known = [(place, wanted[b]) for place, b in enumerate(record.blocks) if b in wanted]
        part = known[0][1][1] if known else 0
        groups = self._parts[part]
        if not known or not matches_pool(record, groups, self._pool):
            return self._mismatch(record)
        places, keys = [], []
        for place, (key, _) in known:
            entry = self._index.get(key)
            if entry is None or any(entry.blocks[g] is None for g in groups):
                places.append(place)
                keys.append(key)
        counts = [len(keys) if g in groups else 0 for g in range(len(self._pool.groups))]
        if not self._pool.can_allocate(counts):
            self._count(restores_without_room=1)
            return False
        blocks = {g: [self._pool.allocate(g) for _ in keys] for g in groups}
        copy_in(record, places, blocks, self._pool)
        for n in reversed(range(len(keys))):
            given: list[int | None] = [None] * len(self._pool.groups)
            for group in groups:
                given[group] = blocks[group][n]
            self._index.put(keys[n], given, maker=0, proven=True)
            for group in groups:
                self._pool.release(group, blocks[group][n])
        return True

    def _take_snapshot(self, sequence: CachedSequence, record: Record) -> bool:
        index = record.end_token // self._pool.block_tokens - 1
        known = (
            {snapshot_digest(key): key for key in self._lookup.snapshot_keys(sequence, index)}
            if 0 <= index < len(sequence.digests)
            else {}
        )
        key = known.get(record.blocks[0])
        snapshot = Snapshot.from_record(record.tensors, record.meta)
        if key is None or snapshot is None or snapshot.num_tokens != record.end_token:
            return self._mismatch(record)
        if not self._states.slots.accepts(snapshot):
            return self._mismatch(record)
        if not self._states.snapshots.put(key, snapshot):
            self._count(restores_without_room=1)
            return False
        return True

    def _mismatch(self, record: Record) -> bool:
        self._count(restore_mismatches=1)
        self._disk.reject(record.key, "it does not fit the model's cache")
        return False
