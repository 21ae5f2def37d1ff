"""What waits to be written: a finished request's runs, copied for the writer between steps.

The queue holds its blocks in the pool until they are copied. Only the engine's thread calls
this.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from osaurus.cache.blocks import BlockPool
from osaurus.cache.lookup import PrefixLookup
from osaurus.cache.prefix import PrefixIndex
from osaurus.cache.runs import RUN_TOKENS, Run, parts_of
from osaurus.cache.sequence import CachedSequence

if TYPE_CHECKING:
    from osaurus.cache.disk import DiskStore


class StoreQueue:
    """`model` names the records' model for people."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        lookup: PrefixLookup,
        disk: DiskStore,
        model: str,
    ) -> None:
        self._pool = pool
        self._index = index
        self._lookup = lookup
        self._disk = disk
        self._model = model
        self._parts = parts_of(pool)
        self._waiting: deque[Run] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def can_store(self) -> bool:
        """Whether the writer would take the next one now."""
        return bool(self._waiting) and self._disk.has_room(self._waiting[0].nbytes(self._pool))

    def store_next(self) -> None:
        """Copy one for the writer."""
        run = self._waiting.popleft()
        try:
            if not self._disk.contains(run.record_key):
                self._disk.put(run.to_record(self._pool))
        finally:
            run.release(self._pool)

    def drop(self) -> int:
        """Let go of all that waits; returns how many those were."""
        dropped = len(self._waiting)
        while self._waiting:
            self._waiting.popleft().release(self._pool)
        return dropped

    def write_all(self) -> None:
        """Hand everything to the writer, waiting for it where it is busy."""
        while self._waiting:
            if not self.can_store:
                self._disk.flush()
            self.store_next()

    def add(self, sequence: CachedSequence) -> None:
        """Queue what is known of a sequence and not on disk yet; its tables hold it still."""
        per_run = max(1, RUN_TOKENS // self._pool.block_tokens)
        for first in range(0, sequence.labelled, per_run):
            last = min(first + per_run, sequence.labelled)
            for part in range(len(self._parts)):
                run = self._run_of(sequence, part, first, last)
                if run is None or self._disk.contains(run.record_key):
                    continue
                for group, blocks in zip(run.groups, run.blocks, strict=True):
                    for block in blocks:
                        self._pool.share(group, block)
                self._waiting.append(run)

    def _run_of(self, sequence: CachedSequence, part: int, first: int, last: int) -> Run | None:
        """The blocks [first, last) of one part that memory has; None for none."""
        size, groups = self._pool.block_tokens, self._parts[part]
        found: list[tuple[bytes, list[int]]] = []
        end = first
        for index in range(first, last):
            for key in self._lookup.keys(sequence, index):
                entry = self._index.get(key)
                blocks = [] if entry is None else [entry.blocks[g] for g in groups]
                held = [block for block in blocks if block is not None]
                if groups and len(held) == len(groups):
                    found.append((key, held))
                    end = index + 1
                    break
        if not found:
            return None
        return Run(
            namespace=sequence.namespace,
            model=self._model,
            part=part,
            first_token=first * size,
            end_token=end * size,
            keys=tuple(key for key, _ in found),
            groups=groups,
            blocks=tuple(tuple(held[n] for _, held in found) for n in range(len(groups))),
        )
