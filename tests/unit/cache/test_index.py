"""Claim: the index finds every block by its digest, and evicts the least useful records."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_records import NAMESPACE, digest, make_run, make_snapshot
from osaurus.cache.index import SCHEMA_VERSION, RecordIndex
from osaurus.cache.records import Record


@pytest.fixture
def index(tmp_path: Path) -> Iterator[RecordIndex]:
    index = RecordIndex(tmp_path / "index.db")
    index.create()
    yield index
    index.close()


def _insert(index: RecordIndex, *records: Record, size: int = 100, now: float = 1.0) -> None:
    for record in records:
        index.insert(record, size, now)


def _recency(index: RecordIndex, record: Record) -> int:
    row = index.row(record.key)
    assert row is not None
    return row.recency


def test_the_file_is_private_and_kept_in_wal(index: RecordIndex) -> None:
    assert index.path.stat().st_mode & 0o777 == 0o600
    assert index.path.with_name("index.db-wal").stat().st_mode & 0o777 == 0o600
    assert index.schema_version() == SCHEMA_VERSION
    assert index.is_sound()
    with sqlite3.connect(index.path) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def test_a_row_says_what_the_record_says(index: RecordIndex) -> None:
    run = make_run("a", 3, first=2)
    index.insert(run, 4321, 12.5)
    row = index.row(run.key)
    assert row is not None
    assert row[:9] == (run.key, NAMESPACE, "org/tiny", "run", 64, 160, 4321, 12.5, 12.5)
    assert index.row("0" * 32) is None
    assert [row.key for row in index.rows()] == [run.key]


def test_blocks_are_found_with_their_place_by_namespace_and_kind(index: RecordIndex) -> None:
    run, snapshot = make_run("a", 3), make_snapshot("a", 2)
    _insert(index, run, snapshot)
    _insert(index, make_run("a", 3, namespace="ff", key="0" * 32))
    found = index.find(NAMESPACE, "run", [digest(("a", 1)), digest(("a", 2)), digest("no")])
    assert sorted(place for *_, place, _ in found) == [1, 2]
    assert {key for _, key, _, _ in found} == {run.key}
    assert index.find(NAMESPACE, "snapshot", [digest(("a", 1))]) == [
        (digest(("a", 1)), snapshot.key, 0, 100)
    ]
    assert index.find("00", "run", [digest(("a", 1))]) == []
    assert index.find(NAMESPACE, "run", []) == []


def test_thousands_of_digests_are_asked_for_in_pieces(index: RecordIndex) -> None:
    runs = [make_run("long", 8, first=8 * n) for n in range(200)]
    _insert(index, *runs)
    asked = [block for run in runs for block in run.blocks]
    assert {row[0] for row in index.find(NAMESPACE, "run", asked)} == set(asked)


def test_an_inserted_record_takes_the_place_of_its_elder(index: RecordIndex) -> None:
    run = make_run("a", 3)
    _insert(index, run, run, size=100)
    index.insert(run, 200, 5.0)
    assert index.totals() == (1, 200)
    assert len(index.find(NAMESPACE, "run", run.blocks)) == 3


def test_removing_a_record_removes_its_blocks(index: RecordIndex) -> None:
    one, other = make_run("a"), make_run("b")
    _insert(index, one, other)
    assert index.remove([one.key, "0" * 32, "no key'"]) == 1
    assert index.find(NAMESPACE, "run", [*one.blocks, *other.blocks])[0][1] == other.key
    assert index.totals() == (1, 100)


def test_touching_makes_all_equally_recent_and_the_others_stay(index: RecordIndex) -> None:
    runs = [make_run(n) for n in range(4)]
    _insert(index, *runs)
    before = [_recency(index, run) for run in runs]
    assert before == sorted(set(before))
    index.touch([runs[0].key, runs[2].key, "0" * 32], 9.0)
    assert _recency(index, runs[0]) == _recency(index, runs[2]) > max(before)
    assert _recency(index, runs[1]) == before[1]
    assert index.rows()[-1].key == runs[1].key
    index.touch([], 10.0)


def test_what_a_record_hangs_on_is_as_recent_as_the_record(index: RecordIndex) -> None:
    chain = [make_run("a", 2, first=2 * n) for n in range(3)]
    stranger, snapshot = make_run("b"), make_snapshot("a", 4)
    _insert(index, *chain, stranger)
    _insert(index, snapshot)
    assert _recency(index, chain[0]) == _recency(index, chain[1]) == _recency(index, snapshot)
    assert _recency(index, chain[2]) < _recency(index, stranger) < _recency(index, snapshot)
    index.touch([chain[2].key], 2.0)
    assert len({_recency(index, run) for run in chain}) == 1


def test_parents_in_a_circle_do_not_hang_it(index: RecordIndex) -> None:
    one = make_run("a", 1, parent=digest(("b", 0)))
    other = make_run("b", 1, parent=digest(("a", 0)))
    _insert(index, one, other)
    index.touch([one.key], 2.0)


def test_eviction_takes_the_oldest_and_a_prefix_from_its_end(index: RecordIndex) -> None:
    old, new = [[make_run(name, 2, first=2 * n) for n in range(3)] for name in "ab"]
    _insert(index, *old, *new)
    assert index.choose_evictions(600) == []
    assert index.choose_evictions(599) == [old[2].key]
    everything = index.choose_evictions(0)
    assert everything == [run.key for run in (*old[::-1], *new[::-1])]
    index.touch([old[2].key], 2.0)
    assert index.choose_evictions(300) == [run.key for run in new[::-1]]


def test_what_can_never_fit_goes_first(index: RecordIndex) -> None:
    small, large = make_run("a"), make_run("b")
    _insert(index, small, size=10)
    _insert(index, large, size=1000)
    assert index.choose_evictions(500) == [large.key]


def test_a_snapshot_goes_with_its_run_and_not_with_a_doubled_one(index: RecordIndex) -> None:
    run, double = make_run("a", 2), make_run("a", 3)
    inner, elsewhere = make_snapshot("a", 1), make_snapshot("b", 1)
    _insert(index, run, inner, elsewhere)
    index.touch([run.key, inner.key], 2.0)
    assert index.choose_evictions(200) == [elsewhere.key]
    assert index.choose_evictions(100) == [elsewhere.key, run.key, inner.key]
    _insert(index, double)
    assert index.choose_evictions(300) == [elsewhere.key]
    # The snapshot's blocks are still held by the longer run: only `run` is least recent.
    index.touch([inner.key], 3.0)
    index.touch([double.key], 4.0)
    assert index.choose_evictions(200) == [elsewhere.key, run.key]


def test_recency_knows_no_time(index: RecordIndex) -> None:
    first, second = make_run("a"), make_run("b")
    _insert(index, first, now=5000.0)
    _insert(index, second, now=10.0)  # the clock was set back
    assert index.choose_evictions(150) == [first.key]
    index.touch([first.key], 1.0)
    assert index.choose_evictions(150) == [second.key]


def test_every_thread_has_a_connection_of_its_own_that_ends_with_it(index: RecordIndex) -> None:
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for n in range(20):
                run = make_run((name, n))
                index.insert(run, 1, 1.0)
                assert index.find(NAMESPACE, "run", run.blocks)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert index.totals() == (80, 80)
    assert len(index._open) == 1


def test_creating_replaces_whatever_tables_there_were(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE records (hash TEXT PRIMARY KEY)")
        db.execute('CREATE TABLE "odd""name" (x INTEGER PRIMARY KEY AUTOINCREMENT)')
        db.execute("PRAGMA user_version=7")
    db.close()
    index = RecordIndex(path)
    assert index.schema_version() == 7
    index.create()
    assert index.schema_version() == SCHEMA_VERSION
    _insert(index, make_run("a"))
    index.set_fact("x", 3)
    index.set_fact("x", 4)
    assert (index.fact("x"), index.fact("y")) == (4, None)
    index.close()
    with pytest.raises(sqlite3.Error):
        index.totals()
