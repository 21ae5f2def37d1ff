"""The background writer: one thread that puts records on disk without disturbing decoding.

In: records whose tensors nobody changes any more, and small jobs on the index, so that the
engine's thread never waits for a write lock. Both are done in the order in which they came.
A record in the queue counts as stored already: `pending` and `pending_places` find it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from osaurus.cache.record_file import RecordKind

if TYPE_CHECKING:
    from osaurus.cache.records import Record

#: Decoding uses every core; of a core that both want, this leaves the writer a tenth.
_NICENESS = 10
_MAX_JOBS = 4096

Job = Callable[[], None]


class _Task(NamedTuple):
    number: int  #: in the order of submission
    work: Record | Job


class BackgroundWriter:
    """A daemon thread, started by the first task and joined by `close`.

    `store` writes one record and must not raise for what can happen to a disk; `failed` is
    told of whatever a task raises all the same, and the thread goes on. Any thread may
    call; the lock guards the queue and is never held while a task runs.
    """

    def __init__(
        self,
        store: Callable[[Record], None],
        failed: Callable[[Exception], None],
        *,
        max_bytes: int,
        max_records: int,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_records = max_records
        self._store = store
        self._failed = failed
        self._changed = threading.Condition()
        self._queue: deque[_Task] = deque()
        self._running: _Task | None = None
        self._pending: dict[str, Record] = {}  # queued or being written
        self._holders: dict[bytes, list[tuple[str, int]]] = {}  # key and place by block
        self._bytes = 0
        self._jobs = 0
        self._submitted = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, record: Record) -> bool:
        """Queue a record; False when the queue is full or closed, or has it already."""
        with self._changed:
            if self._closed or record.key in self._pending or not self._fits(record.nbytes):
                return False
            if not self._push(record):
                return False
            self._pending[record.key] = record
            self._bytes += record.nbytes
            for place, digest in enumerate(record.blocks):
                self._holders.setdefault(digest, []).append((record.key, place))
            return True

    def has_room(self, nbytes: int) -> bool:
        """Whether a record of this size would be taken now; the first one always is."""
        with self._changed:
            return self._fits(nbytes)

    def call(self, job: Job) -> bool:
        """Queue a small job; False when thousands wait already or the writer is closed."""
        with self._changed:
            if self._closed or self._jobs >= _MAX_JOBS or not self._push(job):
                return False
            self._jobs += 1
            return True

    def pending(self, key: str) -> Record | None:
        """A record that is queued or being written."""
        with self._changed:
            return self._pending.get(key)

    def pending_places(
        self, namespace: str, kind: RecordKind, digests: Sequence[bytes]
    ) -> list[tuple[bytes, str, int]]:
        """(digest, key, place) of queued records that hold one of `digests`."""
        with self._changed:
            if not self._pending:
                return []
            found: list[tuple[bytes, str, int]] = []
            for digest in digests:
                for key, place in self._holders.get(digest, ()):
                    record = self._pending[key]
                    if record.namespace == namespace and record.kind == kind:
                        found.append((digest, key, place))
            return found

    def backlog(self) -> tuple[int, int]:
        """Records that wait or are being written, and their bytes."""
        with self._changed:
            return len(self._pending), self._bytes

    def discard(self, is_unwanted: Callable[[Record], bool]) -> int:
        """Take records off the queue and wait for one that is being written; return how
        many were taken off."""
        with self._changed:
            kept: deque[_Task] = deque()
            for task in self._queue:
                if not callable(task.work) and is_unwanted(task.work):
                    self._forget(task.work)
                else:
                    kept.append(task)
            count = len(self._queue) - len(kept)
            self._queue = kept
            self._changed.notify_all()
            running = self._running
            if running and not callable(running.work) and is_unwanted(running.work):
                self._changed.wait_for(lambda: self._running is not running)
            return count

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was queued before this call is done; False after the time."""
        with self._changed:
            last = self._submitted

            def is_done() -> bool:
                first = self._running or (self._queue[0] if self._queue else None)
                return first is None or first.number > last

            return self._changed.wait_for(is_done, timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish what is queued, then end the thread. Again is allowed.

        After `timeout_s` the rest of the queue is dropped; False then, and also when the
        task that runs did not end in a further second.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        finished = self.flush(timeout_s)
        if not finished:
            with self._changed:
                while self._queue:
                    self._forget(self._queue.popleft().work)
                self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
            finished = finished and not thread.is_alive()
        return finished

    def _fits(self, nbytes: int) -> bool:
        if not self._pending:
            return True
        return len(self._pending) < self.max_records and self._bytes + nbytes <= self.max_bytes

    def _push(self, work: Record | Job) -> bool:
        """False when the system has no thread left to give."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        self._submitted += 1
        self._queue.append(_Task(self._submitted, work))
        self._changed.notify_all()
        return True

    def _forget(self, work: Record | Job) -> None:
        if callable(work):
            self._jobs -= 1
            return
        del self._pending[work.key]
        self._bytes -= work.nbytes
        for digest in work.blocks:
            others = [held for held in self._holders.pop(digest, ()) if held[0] != work.key]
            if others:
                self._holders[digest] = others

    def _run(self) -> None:
        _lower_priority()
        while (task := self._next()) is not None:
            try:
                if callable(task.work):
                    task.work()
                else:
                    self._store(task.work)
            except Exception as error:  # noqa: BLE001 - handed on; the next task gets its turn
                self._failed(error)
            with self._changed:
                self._forget(task.work)
                self._running = None
                self._changed.notify_all()

    def _next(self) -> _Task | None:
        """The next task, once there is one; None when closed and done."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._running = self._queue.popleft() if self._queue else None
            return self._running


def _lower_priority() -> None:
    """Of this thread alone, which only Linux can do."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            niceness = max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS)
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
