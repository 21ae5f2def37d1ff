"""What waits to be written: a finished request's runs and snapshots, copied for the writer
between steps.

The queue holds its blocks in the pool until they are copied, and its snapshots by reference.
Only the engine's thread calls this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from osaurus.cache.blocks import BlockPool
from osaurus.cache.key import snapshot_digest, snapshot_record_key
from osaurus.cache.lookup import PrefixLookup
from osaurus.cache.prefix import PrefixIndex
from osaurus.cache.runs import RUN_TOKENS, Run, part_key, parts_of
from osaurus.cache.sequence import CachedSequence
from osaurus.cache.snapshots import Snapshot
from osaurus.cache.state_tier import StateTier

if TYPE_CHECKING:
    from osaurus.cache.disk import DiskStore
    from osaurus.cache.records import Record


#: Share of the pool that may wait for a busy writer.
MAX_HELD_SHARE = 0.25


class _Waiting(Protocol):
    @property
    def record_key(self) -> str: ...

    def nbytes(self, pool: BlockPool) -> int: ...

    def to_record(self, pool: BlockPool) -> Record: ...

    def release(self, pool: BlockPool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A snapshot to be written, under the key of the block that it follows."""

    namespace: bytes
    model: str
    key: bytes
    parent: bytes
    snapshot: Snapshot

    @property
    def record_key(self) -> str:
        return snapshot_record_key(self.key)

    def nbytes(self, pool: BlockPool) -> int:
        return self.snapshot.nbytes

    def to_record(self, pool: BlockPool) -> Record:
        from osaurus.cache.records import Record

        tensors, meta = self.snapshot.to_record()
        return Record(
            key=self.record_key,
            namespace=self.namespace.hex(),
            model=self.model,
            kind="snapshot",
            first_token=self.snapshot.num_tokens,
            end_token=self.snapshot.num_tokens,
            blocks=(snapshot_digest(self.key),),
            parent=self.parent,
            tensors=tensors,
            meta=meta,
        )

    def release(self, pool: BlockPool) -> None:
        """Nothing of the pool is held."""


class StoreQueue:
    """`model` names the records' model for people."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        states: StateTier,
        lookup: PrefixLookup,
        disk: DiskStore,
        model: str,
    ) -> None:
        self._pool = pool
        self._index = index
        self._states = states
        self._lookup = lookup
        self._disk = disk
        self._model = model
        self._parts = parts_of(pool)
        self._waiting: deque[_Waiting] = deque()
        self._keys: set[str] = set()  #: of what waits
        self._held_bytes = 0  #: of the pool, by runs that wait

    def __len__(self) -> int:
        return len(self._waiting)

    def has_snapshot(self, key: bytes) -> bool:
        """Whether the state after a block is on disk or on its way."""
        return self._disk.contains(snapshot_record_key(key))

    @property
    def can_store(self) -> bool:
        """Whether the writer would take the next one now."""
        return bool(self._waiting) and self._disk.has_room(self._waiting[0].nbytes(self._pool))

    def store_next(self) -> None:
        """Copy one for the writer."""
        first = self._take_first()
        try:
            if not self._disk.contains(first.record_key):
                self._disk.put(first.to_record(self._pool))
        finally:
            first.release(self._pool)

    def drop(self) -> int:
        """Let go of all that waits; returns how many those were."""
        dropped = len(self._waiting)
        while self._waiting:
            self._take_first().release(self._pool)
        return dropped

    def write_all(self, timeout_s: float) -> int:
        """Hand everything to the writer, waiting for it where it is busy; returns how many
        were given up when the time was over."""
        deadline = time.monotonic() + timeout_s
        while self._waiting:
            left = deadline - time.monotonic()
            if left <= 0 or not (self.can_store or self._disk.flush(left)):
                return self.drop()
            self.store_next()
        return 0

    def _append(self, item: _Waiting) -> None:
        self._keys.add(item.record_key)
        self._waiting.append(item)

    def _take_first(self) -> _Waiting:
        first = self._waiting.popleft()
        self._keys.discard(first.record_key)
        if isinstance(first, Run):
            self._held_bytes -= first.nbytes(self._pool)
        return first

    def add(self, sequence: CachedSequence) -> int:
        """Queue what is known of a sequence and not on disk yet; its tables hold it still.
        Snapshots go last: without the blocks before them they are of no use. Returns how many
        records did not fit: of runs a share of the pool may wait, of snapshots as many bytes
        as may lie in memory."""
        refused = 0
        for run in self._runs_of(sequence):
            if run.record_key in self._keys or self._disk.contains(run.record_key):
                continue
            if self._held_bytes + run.nbytes(self._pool) > MAX_HELD_SHARE * self._pool.budget_bytes:
                refused += 1
                continue
            for group, blocks in zip(run.groups, run.blocks, strict=True):
                for block in blocks:
                    self._pool.share(group, block)
            self._held_bytes += run.nbytes(self._pool)
            self._append(run)
        room = (self._states.snapshots.max_bytes or 0) - sum(
            item.nbytes(self._pool) for item in self._waiting if isinstance(item, StoredSnapshot)
        )
        for stored in self._snapshots_of(sequence):
            if stored.record_key in self._keys or self._disk.contains(stored.record_key):
                continue
            if stored.snapshot.nbytes > room:
                refused += 1
                continue
            room -= stored.snapshot.nbytes
            self._append(stored)
        return refused

    def _runs_of(self, sequence: CachedSequence) -> Iterator[Run]:
        per_run = max(1, RUN_TOKENS // self._pool.block_tokens)
        parents = [b""] * len(self._parts)
        for first in range(0, sequence.labelled, per_run):
            last = min(first + per_run, sequence.labelled)
            for part in range(len(self._parts)):
                run = self._run_of(sequence, part, first, last, parents[part])
                if run is not None:
                    parents[part] = part_key(run.keys[-1], part)
                    yield run

    def _snapshots_of(self, sequence: CachedSequence) -> Iterator[StoredSnapshot]:
        part = next((part for part, groups in enumerate(self._parts) if groups), 0)
        for index in range(sequence.labelled if self._states.is_used else 0):
            key = self._lookup.snapshot_key(sequence, index)
            snapshot = None if key is None else self._states.snapshots.get(key)
            if key is not None and snapshot is not None:
                yield StoredSnapshot(
                    namespace=sequence.namespace,
                    model=self._model,
                    key=key,
                    parent=part_key(key, part),
                    snapshot=snapshot,
                )

    def _run_of(
        self, sequence: CachedSequence, part: int, first: int, last: int, parent: bytes
    ) -> Run | None:
        """The blocks [first, last) of one part that memory has, without a gap: the first of
        them in full attention, which is read from its start, and the last of a window's, which
        is read at its end. None for none."""
        size, groups = self._pool.block_tokens, self._parts[part]
        found: list[tuple[bytes, list[int]]] = []
        end = first
        is_full = part == 0
        for index in range(first, last):
            for key in self._lookup.keys(sequence, index):
                entry = self._index.get(key)
                blocks = [] if entry is None else [entry.blocks[g] for g in groups]
                held = [block for block in blocks if block is not None]
                if groups and len(held) == len(groups):
                    found.append((key, held))
                    end = index + 1
                    break
            if end == index + 1:
                continue
            if is_full:
                break
            found.clear()
        if not found:
            return None
        return Run(
            namespace=sequence.namespace,
            model=self._model,
            part=part,
            first_token=(end - len(found)) * size,
            end_token=end * size,
            parent=parent,
            keys=tuple(key for key, _ in found),
            groups=groups,
            blocks=tuple(tuple(held[n] for _, held in found) for n in range(len(groups))),
        )
