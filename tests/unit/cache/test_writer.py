"""Claim: the writer does everything once and in order, and what waits counts as stored."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from disk_records import NAMESPACE, digest, make_run, make_snapshot
from osaurus.cache.records import Record
from osaurus.cache.writer import BackgroundWriter

WAIT_S = 20.0


class Slow:
    """A store that writes nothing and waits at its gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.stored: list[str] = []
        self.failures: list[Exception] = []
        self.niceness: int | None = None
        self.error: Exception | None = None

    def __call__(self, record: Record) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if sys.platform == "linux":
            self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if self.error is not None:
            raise self.error
        self.stored.append(record.key)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def writer(slow: Slow) -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter(slow, slow.failures.append, max_bytes=10_000, max_records=3)
    yield writer
    slow.gate.set()
    assert writer.close(WAIT_S)
    assert writer.backlog() == (0, 0)


RUNS = [make_run(n) for n in range(6)]


def _occupy(writer: BackgroundWriter, slow: Slow) -> None:
    assert writer.submit(RUNS[0])
    assert slow.entered.wait(WAIT_S)


def test_records_and_jobs_are_done_in_their_order(writer: BackgroundWriter, slow: Slow) -> None:
    assert writer.submit(RUNS[0])
    assert writer.call(lambda: slow.stored.append("job"))
    assert writer.submit(RUNS[1])
    slow.gate.set()
    assert writer.flush(WAIT_S)
    assert slow.stored == [RUNS[0].key, "job", RUNS[1].key]


def test_a_record_is_found_until_it_is_on_disk(writer: BackgroundWriter, slow: Slow) -> None:
    snapshot = make_snapshot(0, 1)
    _occupy(writer, slow)
    assert writer.submit(snapshot)
    for record in (RUNS[0], snapshot):
        assert writer.pending(record.key) is record
    block = digest((0, 0))
    assert writer.pending_places(NAMESPACE, "run", [block]) == [(block, RUNS[0].key, 0)]
    assert writer.pending_places(NAMESPACE, "snapshot", [block]) == [(block, snapshot.key, 0)]
    assert writer.pending_places("00", "run", [block]) == []
    assert writer.backlog() == (2, RUNS[0].nbytes + snapshot.nbytes)
    slow.gate.set()
    assert writer.flush(WAIT_S)
    assert writer.pending(RUNS[0].key) is None
    assert writer.pending_places(NAMESPACE, "run", [block]) == []


def test_a_full_queue_refuses_at_once(writer: BackgroundWriter, slow: Slow) -> None:
    _occupy(writer, slow)
    assert not writer.submit(RUNS[0])
    assert not writer.has_room(10_000)
    assert not writer.submit(make_run("wide", 2, size=2500))  # more than is left
    assert writer.submit(RUNS[1])
    assert writer.submit(RUNS[2])
    assert not writer.has_room(1)
    assert not writer.submit(RUNS[3])
    slow.gate.set()
    assert writer.flush(WAIT_S)
    assert writer.submit(RUNS[3])


def test_a_record_beyond_the_bound_is_taken_by_an_empty_queue(
    writer: BackgroundWriter, slow: Slow
) -> None:
    wide = make_run("wide", 2, size=5000)
    assert wide.nbytes > writer.max_bytes
    assert writer.has_room(wide.nbytes)
    assert writer.submit(wide)
    assert not writer.submit(RUNS[0])
    slow.gate.set()


def test_a_failing_task_is_reported_and_the_next_one_runs(
    writer: BackgroundWriter, slow: Slow
) -> None:
    slow.gate.set()
    slow.error = RuntimeError("disk on fire")
    assert writer.submit(RUNS[0])
    assert writer.flush(WAIT_S)
    slow.error = None
    assert writer.submit(RUNS[0])
    assert writer.call(lambda: (_ for _ in ()).throw(KeyError("job")))
    assert writer.flush(WAIT_S)
    assert [type(error) for error in slow.failures] == [RuntimeError, KeyError]
    assert slow.stored == [RUNS[0].key]


def test_flush_gives_up_after_its_time(writer: BackgroundWriter, slow: Slow) -> None:
    assert writer.flush(0.0)
    _occupy(writer, slow)
    assert not writer.flush(0.01)


def test_discarding_waits_for_the_one_being_written(writer: BackgroundWriter, slow: Slow) -> None:
    _occupy(writer, slow)
    assert writer.submit(RUNS[1])
    assert writer.submit(RUNS[2])
    assert writer.discard(lambda record: record is RUNS[2]) == 1
    opener = threading.Timer(0.02, slow.gate.set)
    opener.start()
    assert writer.discard(lambda _: True) == 1
    assert slow.stored == [RUNS[0].key]
    assert writer.backlog() == (0, 0)
    opener.join()


def test_closing_writes_what_is_queued_and_takes_no_more(
    writer: BackgroundWriter, slow: Slow
) -> None:
    _occupy(writer, slow)
    assert writer.submit(RUNS[1])
    slow.gate.set()
    assert writer.close(WAIT_S)
    assert slow.stored == [RUNS[0].key, RUNS[1].key]
    assert not writer.submit(RUNS[2])
    assert not writer.call(lambda: None)
    assert writer.flush(WAIT_S)


def test_closing_drops_what_takes_too_long(writer: BackgroundWriter, slow: Slow) -> None:
    _occupy(writer, slow)
    assert writer.submit(RUNS[1])
    opener = threading.Timer(0.05, slow.gate.set)
    opener.start()
    assert not writer.close(0.0)
    assert writer.close(WAIT_S)
    assert slow.stored == [RUNS[0].key]
    opener.join()


def test_a_writer_that_never_had_work_has_no_thread() -> None:
    before = threading.active_count()
    writer = BackgroundWriter(Slow(), print, max_bytes=1, max_records=1)
    assert threading.active_count() == before
    assert writer.close(WAIT_S)


def test_without_a_thread_to_be_had_a_record_is_refused(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = BackgroundWriter(slow, slow.failures.append, max_bytes=1, max_records=1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not writer.submit(RUNS[0])
    assert not writer.call(lambda: None)
    assert writer.backlog() == (0, 0)
    assert writer.close(WAIT_S)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has its own priority on Linux only")
def test_the_thread_is_nicer_than_decoding(writer: BackgroundWriter, slow: Slow) -> None:
    slow.gate.set()
    assert writer.submit(RUNS[0])
    assert writer.flush(WAIT_S)
    assert slow.niceness is not None
    assert slow.niceness >= max(10, os.getpriority(os.PRIO_PROCESS, 0))
