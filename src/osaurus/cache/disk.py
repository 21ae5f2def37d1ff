"""The disk tier: records that outlive the process, found by the digests of their blocks.

    open_store -> DiskStore     put ... find -> load -> (use) -> touch     flush, close

Content-addressed: equal keys mean equal records, so processes may share a directory. The
engine's thread may call everything but `clear`, `verify`, `flush` and `close`, which wait.
Nothing here raises for what disks, other processes or old versions can do: it is a miss or
a refused store, and a counter says why. Keys, digests and geometry are the caller's.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from osaurus.cache import upkeep
from osaurus.cache.counters import Counters
from osaurus.cache.files import (
    INDEX_NAME,
    RecordFiles,
    StepHook,
    Throttle,
    no_step,
    no_throttle,
    probe,
)
from osaurus.cache.index import SCHEMA_VERSION, RecordIndex, RecordRow
from osaurus.cache.quota import quota_bytes
from osaurus.cache.record_file import CorruptRecord, RecordKind
from osaurus.cache.storer import RecordStorer
from osaurus.cache.upkeep import VerifyReport
from osaurus.cache.writer import BackgroundWriter

if TYPE_CHECKING:
    # torch is imported when tensors move, not to list or clear records.
    from osaurus.cache.records import Record

_log = logging.getLogger(__name__)

DEFAULT_QUEUE_BYTES = 256 << 20
DEFAULT_QUEUE_RECORDS = 256

_MAX_QUARANTINE_BYTES = 256 << 20
_QUOTA_FACT = "quota_bytes"

T = TypeVar("T")


class BlockPlace(NamedTuple):
    """Where a block is: number `place` of the run `key`."""

    key: str
    place: int


class Cleared(NamedTuple):
    records: int
    freed_bytes: int


def open_store(
    directory: Path,
    *,
    max_percent: float | None = None,
    max_gb: float | None = None,
    clock: Callable[[], float] = time.time,
    throttle: Throttle = no_throttle,
    at_step: StepHook = no_step,
    queue_bytes: int = DEFAULT_QUEUE_BYTES,
    queue_records: int = DEFAULT_QUEUE_RECORDS,
    min_free_bytes: int | None = None,
) -> DiskStore | str:
    """Open the disk tier in `directory`, or say in a line why there can be none.

    Makes the directory, proves by a write that it can be used, removes what a crash left
    and what an older schema wrote. The quota is `max_percent` of the volume's capacity, else
    `max_gb`, else the default (`quota.quota_bytes`); `min_free_bytes` replaces the free space
    that stores must leave. `clock` gives seconds since the epoch and may go backwards.
    `throttle` is called on the writer's thread after each piece and may wait there.
    """
    try:
        probe(directory)
        quota = quota_bytes(directory, max_percent=max_percent, max_gb=max_gb)
        files = _record_files(directory, quota)
        index = upkeep.prepare_index(files, clock())
        if isinstance(index, str):
            return index
        store = DiskStore(
            files,
            index,
            quota=quota,
            clock=clock,
            throttle=throttle,
            at_step=at_step,
            queue_bytes=queue_bytes,
            queue_records=queue_records,
            min_free_bytes=min_free_bytes,
        )
        store.tidy()
    except OSError as error:
        return f"{directory}: {error.strerror or error}"
    except sqlite3.Error as error:
        return f"{directory}: its index cannot be used: {error}"
    return store


def open_existing(
    directory: Path, *, clock: Callable[[], float] = time.time
) -> DiskStore | str | None:
    """Open what is there for looking and deleting: makes, sweeps and purges nothing.

    None when there is nothing, a reason when it cannot be opened.
    """
    path = directory / INDEX_NAME
    try:
        if not path.exists():
            return None
        index = RecordIndex(path)
        if (schema := index.schema_version()) != SCHEMA_VERSION:
            return f"{path} has schema {schema}; this osaurus knows {SCHEMA_VERSION}"
        quota = index.fact(_QUOTA_FACT) or quota_bytes(directory)
    except OSError as error:
        return f"{directory}: {error.strerror or error}"
    except sqlite3.Error as error:
        return f"{directory}: its index cannot be used: {error}"
    return DiskStore(_record_files(directory, quota), index, quota=quota, clock=clock)


class DiskStore:
    """One directory of records; made by `open_store`. One a process is enough for all models.

    Counters: `hits` are records that were used (`touch`), `misses` lookups that found
    nothing of the prefix.
    """

    def __init__(
        self,
        files: RecordFiles,
        index: RecordIndex,
        *,
        quota: int,
        clock: Callable[[], float],
        throttle: Throttle = no_throttle,
        at_step: StepHook = no_step,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        queue_records: int = DEFAULT_QUEUE_RECORDS,
        min_free_bytes: int | None = None,
    ) -> None:
        self.directory = files.directory
        self.quota_bytes = quota
        self._files = files
        self._index = index
        self._clock = clock
        self._counters = Counters()
        self._closed = False
        self._clears_waiting = 0
        self._storer = RecordStorer(
            files,
            index,
            self._counters,
            quota=quota,
            clock=clock,
            throttle=throttle,
            at_step=at_step,
            min_free_bytes=min_free_bytes,
        )
        self._writer = BackgroundWriter(
            self._storer.store,
            self._storer.failed,
            max_bytes=queue_bytes,
            max_records=queue_records,
        )

    # Looking up

    def find(self, namespace: str, digests: Sequence[bytes]) -> list[BlockPlace | None]:
        """For each block digest of a prefix, in order, the run that holds it.

        Of several runs the one that goes on furthest, so that few are loaded. Recency and
        hit counts stay as they are until `touch`.
        """
        held = self._held(namespace, "run", digests)
        places: list[BlockPlace | None] = []
        while len(places) < len(digests):
            start = len(places)
            if not held[start]:
                places.append(None)
                continue
            key = max(held[start], key=lambda key: (_reach(held, start, key), key))
            stop = start + _reach(held, start, key)
            places += [BlockPlace(key, held[at][key]) for at in range(start, stop)]
        if digests and not any(places):
            self._counters.add("misses")
        return places

    def find_snapshots(self, namespace: str, digests: Sequence[bytes]) -> list[str | None]:
        """For each digest the key of its snapshot. As `find`, recency stays as it is."""
        held = self._held(namespace, "snapshot", digests)
        return [min(keys) if keys else None for keys in held]

    def contains(self, key: str) -> bool:
        """Whether a record is durable or will be: queued, or a row and a file of its size."""
        if self._writer.pending(key) is not None:
            return True
        row = self._asked(lambda: self._index.row(key), None)
        return row is not None and self._has_file(key, row.file_size)

    def load(self, key: str) -> Record | None:
        """Read and check a record; None is a miss whose reason is counted.

        The tensors are the record's own, or those of a queued record: copy, don't change.
        A damaged file goes to quarantine and its row away.
        """
        if (queued := self._writer.pending(key)) is not None:
            self._counters.add("loads")
            return queued
        from osaurus.cache.records import read_record

        row = self._asked(lambda: self._index.row(key), None)
        if row is None:
            self._counters.add("load_missing")
            return None
        try:
            record = read_record(self._files.path(key), row.file_size)
            if (record.key, record.namespace) != (key, row.namespace):
                raise CorruptRecord(f"it is record {record.key} of another place")
        except FileNotFoundError:
            self._counters.add("load_missing")
            self._writer.call(lambda: self._forget_lost(key))
            return None
        except (CorruptRecord, OSError, RuntimeError) as error:
            # RuntimeError is torch's word for memory it did not get.
            if upkeep.is_damage(error):
                self._put_aside(key, str(error))
            else:
                self._counters.add("read_errors")
                _log.warning("KV record %s cannot be read: %s", key, error)
            return None
        self._counters.add("loads")
        self._counters.add("load_bytes", row.file_size)
        return record

    def reject(self, key: str, reason: str) -> None:
        """Treat a loaded record as damaged, because its contents don't fit the caller."""
        self._put_aside(key, reason)

    def touch(self, keys: Iterable[str]) -> None:
        """Count these records as used together just now, and with them the runs before them.

        Only for what was accepted: a candidate that was turned down keeps its age.
        """
        if used := list(keys):
            self._counters.add("hits", len(used))
            self._renew(used)

    # Storing

    def put(self, record: Record) -> bool:
        """Queue a record; whether it is stored or will be.

        False has its reason in the counter `store_refused_<reason>`: closed, too_large,
        disk_full, queue_full. Later ones, on the writer's thread: low_space, invalid.
        """
        if self.contains(record.key):
            self._counters.add("store_skips")
            self._renew([record.key])
            return True
        if self._closed:
            return self._refuse("closed")
        if record.nbytes > self.quota_bytes:
            return self._refuse("too_large")
        if self._storer.is_paused:
            return self._refuse("disk_full")
        return self._writer.submit(record) or self._refuse("queue_full")

    def has_room(self, nbytes: int) -> bool:
        """Whether the queue would take a record of this size now; one beyond all bounds fits
        an empty queue. Says nothing of the disk: `put` refuses at once what cannot be."""
        return self._writer.has_room(nbytes)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was put before is on disk; False after the time."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write what is queued, then end; what took longer is dropped. Records stay."""
        self._closed = True
        finished = self._writer.close(timeout_s)
        if finished:
            self._index.close()
        return finished

    # Watching and tidying

    def stats(self) -> dict[str, int]:
        """Counters since opening, and what is stored now. Sizes are bytes."""
        records, stored_bytes = self._asked(self._index.totals, (0, 0))
        queued, queued_bytes = self._writer.backlog()
        always = ("hits", "misses", "stores", "store_skips", "evictions", "corruptions")
        return dict.fromkeys((*always, "orphans_removed", "write_errors"), 0) | {
            **self._counters.snapshot(),
            "records": records,
            "bytes": stored_bytes,
            "quota_bytes": self.quota_bytes,
            "queue_records": queued,
            "queue_bytes": queued_bytes,
        }

    def entries(self) -> list[RecordRow]:
        """All records, the most recently used first."""
        return self._asked(self._index.rows, [])

    def quarantine_bytes(self) -> int:
        """Bytes of damaged records that were put aside. Raises OSError."""
        return self._files.quarantine_size()

    def clear(self, *, namespace: str | None = None, model: str | None = None) -> Cleared:
        """Delete the records of a namespace, of a model, or all, with quarantine and orphans.

        Needs no lock: deleting twice does no harm. Raises OSError, `sqlite3.Error`.
        """
        self._writer.discard(
            lambda record: _is_meant(record.namespace, record.model, namespace, model)
        )
        rows = self._clear_rows(namespace, model)
        if namespace is None and model is None:
            for key in self._files.scan():
                self._files.remove(key)
            self._files.trim_quarantine(0)
        return Cleared(len(rows), sum(row.file_size for row in rows))

    def clear_soon(self, model: str) -> None:
        """Delete a model's records on the writer's thread, after what it is writing. For the
        engine's thread, which must not wait for a disk; nothing is found until it is done."""

        def clear() -> None:
            try:
                self._clear_rows(None, model)
            finally:
                self._clears_waiting -= 1

        self._clears_waiting += 1
        if not self._writer.call(clear):
            self._clears_waiting -= 1

    def _clear_rows(self, namespace: str | None, model: str | None) -> list[RecordRow]:
        rows = [
            row
            for row in self._index.rows()
            if _is_meant(row.namespace, row.model, namespace, model)
        ]
        upkeep.delete(self._files, self._index, [row.key for row in rows])
        return rows

    def verify(self) -> VerifyReport:
        """Check every file against its checksum; damaged ones go to quarantine.

        Raises OSError, `sqlite3.Error`.
        """
        return upkeep.verify(self._files, self._index, self._counters, self._clock())

    def tidy(self) -> None:
        """Remove what a crash left, then evict down to the quota, unless another process is
        at it. Raises OSError, `sqlite3.Error`."""
        upkeep.sweep(self._files, self._index, self._counters, self._clock())
        self._index.set_fact(_QUOTA_FACT, self.quota_bytes)
        upkeep.enforce_quota(self._files, self._index, self._counters, self.quota_bytes)

    # Small things

    def _forget_lost(self, key: str) -> None:
        if self._files.size(key) is None:
            self._index.remove([key])

    def _renew(self, keys: list[str]) -> None:
        now = self._clock()
        self._writer.call(lambda: self._index.touch(keys, now))

    def _held(
        self, namespace: str, kind: RecordKind, digests: Sequence[bytes]
    ) -> list[dict[str, int]]:
        """For each digest its records that are there, as key: place."""
        if self._clears_waiting:
            return [{} for _ in digests]
        by_digest: dict[bytes, dict[str, int]] = {}
        pending = self._writer.pending_places(namespace, kind, digests)
        rows = self._asked(lambda: self._index.find(namespace, kind, digests), [])
        has_file: dict[str, bool] = {}
        for digest, key, place, size in rows:
            if key not in has_file:
                has_file[key] = self._has_file(key, size)
            if has_file[key]:
                by_digest.setdefault(digest, {})[key] = place
        for digest, key, place in pending:
            by_digest.setdefault(digest, {})[key] = place
        return [by_digest.get(digest, {}) for digest in digests]

    def _has_file(self, key: str, size: int) -> bool:
        try:
            return self._files.size(key) == size
        except OSError:
            return False

    def _put_aside(self, key: str, reason: str) -> None:
        self._counters.add("corruptions")
        _log.warning("KV record %s is damaged: %s", key, reason)
        try:
            self._files.quarantine(key)
        except OSError as error:
            _log.warning("KV record %s cannot be put aside: %s", key, error)
        self._writer.call(lambda: self._forget_lost(key))

    def _refuse(self, reason: str) -> bool:
        self._counters.add(f"store_refused_{reason}")
        return False

    def _asked(self, ask: Callable[[], T], otherwise: T) -> T:
        """An answer of the index, or `otherwise` when it cannot give one."""
        try:
            return ask()
        except (OSError, sqlite3.Error) as error:
            if not self._closed:
                self._counters.add("index_errors")
                _log.warning("the index of %s failed: %s", self.directory, error)
            return otherwise


def _reach(held: Sequence[dict[str, int]], start: int, key: str) -> int:
    """How many digests from `start` on the record `key` holds without a gap."""
    stop = start
    while stop < len(held) and key in held[stop]:
        stop += 1
    return stop - start


def _is_meant(
    namespace: str, model: str, wanted_namespace: str | None, wanted_model: str | None
) -> bool:
    return wanted_namespace in (None, namespace) and wanted_model in (None, model)


def _record_files(directory: Path, quota: int) -> RecordFiles:
    return RecordFiles(directory, quarantine_bytes=min(quota // 20, _MAX_QUARANTINE_BYTES))
