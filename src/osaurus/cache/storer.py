"""One record's way to disk: the checks, the file, the row, the quota; on the writer's thread."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from osaurus.cache import upkeep
from osaurus.cache.counters import Counters
from osaurus.cache.files import RecordFiles, StepHook, Throttle
from osaurus.cache.index import RecordIndex, is_full
from osaurus.cache.quota import has_room

if TYPE_CHECKING:
    from osaurus.cache.records import Record

_log = logging.getLogger(__name__)

#: How long stores rest after the volume was full or turned read-only.
PAUSE_S = 60.0

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class RecordStorer:
    """Stores records one after the other and counts why it did not. `is_paused` may be asked
    from any thread."""

    def __init__(
        self,
        files: RecordFiles,
        index: RecordIndex,
        counters: Counters,
        *,
        quota: int,
        clock: Callable[[], float],
        throttle: Throttle,
        at_step: StepHook,
        min_free_bytes: int | None,
    ) -> None:
        self._files = files
        self._index = index
        self._counters = counters
        self._quota_bytes = quota
        self._clock = clock
        self._throttle = throttle
        self._at_step = at_step
        self._min_free_bytes = min_free_bytes
        self._paused_at: float | None = None

    @property
    def is_paused(self) -> bool:
        """Bounded from both sides, so that a clock set back does not prolong the pause."""
        return self._paused_at is not None and 0 <= self._clock() - self._paused_at < PAUSE_S

    def store(self, record: Record) -> None:
        """Write a record and its row, then evict down to the quota. Raises `sqlite3.Error`
        and what eviction raises; the record is then not stored, or stored and too much."""
        now = self._clock()
        refusal = self._refusal(record)
        if refusal:
            self._counters.add(refusal)
            return
        try:
            size = self._write(record, now)
        except ValueError as error:
            self._counters.add("store_refused_invalid")
            _log.warning("a KV record cannot be stored: %s", error)
            return
        if size is None:
            self._counters.add("store_refused_too_large")
            return
        try:
            self._index.insert(record, size, now)
        except sqlite3.Error:
            self._files.remove(record.key)
            raise
        self._at_step("indexed")
        self._counters.add("stores")
        self._counters.add("store_bytes", size)
        upkeep.enforce_quota(self._files, self._index, self._counters, self._quota_bytes)

    def failed(self, error: Exception) -> None:
        """Count what a task of the writer raised; rest when there is no space."""
        if is_full(error) or getattr(error, "errno", None) in _NO_SPACE:
            self._paused_at = self._clock()
        self._counters.add("write_errors")
        where = self._files.directory
        _log.warning("the KV cache in %s could not be written: %s", where, error)

    def _refusal(self, record: Record) -> str:
        """The counter of why the record is not to be written now; "" when it is."""
        if self.is_paused:
            return "store_refused_disk_full"
        row = self._index.row(record.key)
        if row is not None and self._files.size(record.key) == row.file_size:
            return "store_skips"  # another process was first
        if not has_room(self._files.directory, record.nbytes, self._min_free_bytes):
            return "store_refused_low_space"
        return ""

    def _write(self, record: Record, now: float) -> int | None:
        """Bytes on disk; None when header and data together are more than the quota."""
        # torch comes with the first record.
        from osaurus.cache.records import encode

        header, data = encode(record, _timestamp(now))
        if len(header) + record.nbytes > self._quota_bytes:
            return None
        return self._files.write(
            record.key, header, data, throttle=self._throttle, at_step=self._at_step
        )


def _timestamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
