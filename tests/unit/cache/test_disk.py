"""Claim: what was put is found, by block, after a restart too; nothing grows past its bounds."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from disk_records import NAMESPACE, FakeClock, digest, make_run, make_snapshot, same
from osaurus.cache import quota
from osaurus.cache.disk import BlockPlace, DiskStore, open_existing, open_store
from osaurus.cache.quota import GB, capacity_bytes, has_room, quota_bytes
from osaurus.cache.records import Record

WAIT_S = 20.0

Opener = Callable[..., DiskStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Opens a store in the test's directory; every one is closed in the end."""
    stores: list[DiskStore] = []

    def open_one(directory: Path = tmp_path / "kv", **options: Any) -> DiskStore:
        store = open_store(directory, **{"max_gb": 1, "min_free_bytes": 0, **options})
        assert isinstance(store, DiskStore), store
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        assert store.close(WAIT_S)


def _fill(store: DiskStore, *records: Record) -> None:
    """Put one after the other, so that recency is their order."""
    for record in records:
        assert store.put(record)
        assert store.flush(WAIT_S)


def _files(store: DiskStore) -> set[str]:
    return {path.name for path in store.directory.iterdir() if "cache" not in path.name}


def _size(record: Record, tmp_path: Path, opened: Opener) -> int:
    """Bytes that such a record takes on disk."""
    store = opened(tmp_path / "measured")
    _fill(store, record)
    return store.stats()["bytes"]


def test_what_was_put_is_found_and_loaded_after_a_restart(opened: Opener) -> None:
    run, snapshot = make_run("a", 3), make_snapshot("a", 3)
    store = opened()
    _fill(store, run, snapshot)
    store.close()
    store = opened()
    asked = [*run.blocks, digest("unknown")]
    assert store.find(NAMESPACE, asked) == [*(BlockPlace(run.key, n) for n in range(3)), None]
    assert store.find_snapshots(NAMESPACE, asked) == [None, None, snapshot.key, None]
    assert same(store.load(run.key), run)
    assert same(store.load(snapshot.key), snapshot)
    assert store.contains(run.key)
    assert not store.contains("0" * 32)
    assert store.load("0" * 32) is None
    assert store.find("00", asked) == [None] * 4
    assert store.find(NAMESPACE, []) == []


def test_files_and_directory_are_the_users_alone(opened: Opener) -> None:
    store = opened()
    _fill(store, make_run("a"))
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    for path in store.directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_directory_that_was_there_keeps_its_mode(tmp_path: Path, opened: Opener) -> None:
    tmp_path.chmod(0o755)
    opened(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_record_that_waits_in_the_queue_is_found_and_loaded(opened: Opener) -> None:
    gate = threading.Event()
    store = opened(throttle=lambda _: gate.wait(WAIT_S))
    run, snapshot = make_run("a"), make_snapshot("a", 2)
    assert store.put(run)
    assert store.put(snapshot)
    assert store.contains(snapshot.key)
    assert store.find(NAMESPACE, run.blocks) == [BlockPlace(run.key, n) for n in range(2)]
    assert store.find_snapshots(NAMESPACE, run.blocks) == [None, snapshot.key]
    assert store.load(run.key) is run
    assert store.stats()["queue_records"] == 2
    assert store.put(run)
    gate.set()
    assert store.flush(WAIT_S)
    assert (store.stats()["stores"], store.stats()["store_skips"]) == (2, 1)


def test_the_run_that_goes_on_furthest_is_chosen(opened: Opener) -> None:
    store = opened()
    short, long, tail = make_run("a", 2), make_run("a", 4), make_run("a", 2, first=4)
    _fill(store, short, long, tail)
    blocks = [digest(("a", n)) for n in range(6)]
    expected = [BlockPlace(long.key, n) for n in range(4)]
    expected += [BlockPlace(tail.key, n) for n in range(2)]
    assert store.find(NAMESPACE, blocks) == expected
    os.unlink(store.directory / f"{long.key}.safetensors")
    found = store.find(NAMESPACE, blocks)
    assert [place and place.key for place in found] == [
        short.key, short.key, None, None, tail.key, tail.key,
    ]  # fmt: skip


def test_a_record_is_stored_once(opened: Opener) -> None:
    store = opened()
    run = make_run("a")
    _fill(store, run, run)
    assert store.stats() | {"stores": 1, "store_skips": 1, "records": 1} == store.stats()
    # A row alone is not durable.
    os.unlink(store.directory / f"{run.key}.safetensors")
    assert not store.contains(run.key)
    _fill(store, run)
    assert store.stats()["stores"] == 2
    assert same(store.load(run.key), run)


def test_a_file_without_a_row_is_renewed_by_the_next_store(opened: Opener) -> None:
    store = opened()
    run = make_run("a")
    (store.directory / f"{run.key}.safetensors").write_bytes(b"left by a crash")
    assert not store.contains(run.key)
    _fill(store, run)
    assert same(store.load(run.key), run)


def test_what_was_read_is_whole_though_its_file_goes_away(opened: Opener) -> None:
    store = opened()
    run = make_run("a", size=100_000)
    _fill(store, run)
    loaded = store.load(run.key)
    path = store.directory / f"{run.key}.safetensors"
    os.truncate(path, 10)
    path.unlink()
    assert same(loaded, run)


def test_hits_and_misses_are_counted_on_use_only(opened: Opener) -> None:
    store = opened()
    one, other = make_run("a"), make_run("b")
    _fill(store, one, other)
    order = [row.key for row in store.entries()]
    assert order == [other.key, one.key]
    store.find(NAMESPACE, one.blocks)
    store.load(one.key)
    store.flush(WAIT_S)
    assert [row.key for row in store.entries()] == order
    assert store.stats()["hits"] == 0
    store.touch([one.key])
    store.flush(WAIT_S)
    assert [row.key for row in store.entries()] == order[::-1]
    store.find(NAMESPACE, [digest("unknown")])
    store.touch([])
    assert store.stats() | {"hits": 1, "misses": 1, "loads": 1} == store.stats()


def test_eviction_keeps_the_quota_and_the_recently_used(tmp_path: Path, opened: Opener) -> None:
    size = _size(make_run("x"), tmp_path, opened)
    store = opened(max_gb=3.5 * size / GB)
    one, two, three, four = [make_run(name) for name in "abcd"]
    _fill(store, one, two, three)
    store.touch([one.key])
    _fill(store, four)
    assert [store.contains(run.key) for run in (one, two, three, four)] == [True, False, True, True]
    stats = store.stats()
    assert (stats["records"], stats["evictions"]) == (3, 1)
    assert stats["bytes"] <= stats["quota_bytes"]
    assert _files(store) == {f"{run.key}.safetensors" for run in (one, three, four)}


def test_a_clock_set_back_does_not_turn_the_order_round(tmp_path: Path, opened: Opener) -> None:
    size = _size(make_run("x"), tmp_path, opened)
    clock = FakeClock()
    store = opened(max_gb=2.5 * size / GB, clock=clock)
    old, middle, new = [make_run(name) for name in "abc"]
    _fill(store, old)
    clock.now -= 86_400
    _fill(store, middle)
    clock.now -= 86_400
    _fill(store, new)
    assert [store.contains(run.key) for run in (old, middle, new)] == [False, True, True]


def test_a_smaller_quota_holds_from_the_next_opening(tmp_path: Path, opened: Opener) -> None:
    size = _size(make_run("x"), tmp_path, opened)
    store = opened()
    runs = [make_run(n) for n in range(4)]
    _fill(store, *runs)
    store.close()
    store = opened(max_gb=2 * size / GB)
    assert [store.contains(run.key) for run in runs] == [False, False, True, True]


def test_a_record_larger_than_the_quota_is_refused_and_evicts_nothing(
    tmp_path: Path, opened: Opener
) -> None:
    size = _size(make_run("x"), tmp_path, opened)
    store = opened(max_gb=1.5 * size / GB)
    _fill(store, make_run("a"))
    assert not store.put(make_run("b", 40))
    # Its tensors alone would fit, its header makes it too large: found on the writer's thread.
    assert store.put(make_run("c", size=64, meta={"x": "y" * size}))
    assert store.flush(WAIT_S)
    assert store.stats()["store_refused_too_large"] == 2
    assert store.stats()["records"] == 1


def test_a_full_queue_a_closed_store_and_a_bad_tensor_are_reasons(opened: Opener) -> None:
    gate = threading.Event()
    store = opened(throttle=lambda _: gate.wait(WAIT_S), queue_records=1)
    assert store.has_room(1)
    assert store.put(make_run("a"))
    assert not store.has_room(1)
    assert not store.put(make_run("b"))
    gate.set()
    assert store.flush(WAIT_S)
    assert store.put(make_run("t", tensors={"x": torch.zeros(2, 3).t()}))
    assert store.flush(WAIT_S)
    store.close()
    assert not store.put(make_run("c"))
    assert store.find(NAMESPACE, [digest(("a", 0))]) == [None]
    assert store.load(make_run("a").key) is None
    counted = {name: n for name, n in store.stats().items() if name.startswith("store_refused")}
    assert counted == {
        "store_refused_queue_full": 1,
        "store_refused_invalid": 1,
        "store_refused_closed": 1,
    }
    assert store.close(WAIT_S)


def test_free_space_is_left_to_others(opened: Opener) -> None:
    store = opened(min_free_bytes=1 << 60)
    assert store.put(make_run("a"))
    assert store.flush(WAIT_S)
    assert store.stats()["store_refused_low_space"] == 1
    assert not store.contains(make_run("a").key)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_after_a_full_disk_stores_rest_for_a_minute(opened: Opener, code: int) -> None:
    clock = FakeClock()
    faults = {"written"}

    def at_step(step: str) -> None:
        if step in faults:
            raise OSError(code, "injected")

    store = opened(clock=clock, at_step=at_step)
    assert store.put(make_run("a"))
    assert store.flush(WAIT_S)
    assert _files(store) == set()
    faults.clear()
    clock.now += 59
    assert not store.put(make_run("a"))
    clock.now += 2
    _fill(store, make_run("a"))
    stats = store.stats()
    assert (stats["write_errors"], stats["store_refused_disk_full"], stats["stores"]) == (1, 1, 1)


def test_a_clock_set_back_does_not_prolong_the_rest(opened: Opener) -> None:
    clock = FakeClock()
    faults = {"synced"}

    def at_step(step: str) -> None:
        if step in faults:
            raise OSError(errno.ENOSPC, "injected")

    store = opened(clock=clock, at_step=at_step)
    assert store.put(make_run("a"))
    assert store.flush(WAIT_S)
    faults.clear()
    clock.now -= 3600
    _fill(store, make_run("a"))
    assert store.contains(make_run("a").key)


def test_any_other_write_error_is_counted_and_the_next_store_tries_again(opened: Opener) -> None:
    faults = {"replaced"}

    def at_step(step: str) -> None:
        if step in faults:
            raise OSError(errno.EIO, "injected")

    store = opened(at_step=at_step)
    assert store.put(make_run("a"))
    assert store.flush(WAIT_S)
    assert store.stats()["write_errors"] == 1
    faults.clear()
    _fill(store, make_run("a"))
    assert same(store.load(make_run("a").key), make_run("a"))


@pytest.mark.parametrize(
    "error", [sqlite3.ProgrammingError("closed"), sqlite3.OperationalError("x"), KeyError("x")]
)
def test_an_error_of_any_kind_leaves_the_writer_alive(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store = opened()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("osaurus.cache.index.RecordIndex.insert", fail)
        assert store.put(make_run("a"))
        assert store.flush(WAIT_S)
    assert store.stats() | {"write_errors": 1, "records": 0} == store.stats()
    _fill(store, make_run("a"))
    assert same(store.load(make_run("a").key), make_run("a"))


class _Case(NamedTuple):
    percent: float | None
    gb: float | None
    capacity: int | None
    expected: int


@pytest.mark.parametrize(
    "case",
    [
        _Case(1, None, 200 * GB, 2 * GB),
        _Case(1, 50, 200 * GB, 2 * GB),  # the percentage wins
        _Case(0.5, None, 10 * GB, GB // 20),  # no floor under what was asked for
        _Case(0, None, 200 * GB, 0),
        _Case(None, 3, 200 * GB, 3 * GB),
        _Case(None, 0.5, None, GB // 2),
        _Case(None, None, 200 * GB, 20 * GB),
        _Case(None, None, 50 * GB, 10 * GB),
        _Case(None, None, None, 10 * GB),
        _Case(5, None, None, 10 * GB),
    ],
)
def test_the_quota_by_its_order(case: _Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "capacity_bytes", lambda _: case.capacity)
    found = quota_bytes(Path("/x"), max_percent=case.percent, max_gb=case.gb)
    assert found == case.expected


def test_the_capacity_is_that_of_the_nearest_ancestor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert capacity_bytes(tmp_path / "a" / "b") == shutil.disk_usage(tmp_path).total

    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "injected")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert capacity_bytes(tmp_path) is None


def test_two_gb_or_a_hundredth_of_the_volume_stay_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=100 * GB, free=3 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert has_room(tmp_path, GB)
    assert not has_room(tmp_path, GB + 1)
    usage = usage._replace(total=400 * GB)
    assert not has_room(tmp_path, 1)


def test_clear_deletes_a_namespace_a_model_or_all(opened: Opener) -> None:
    store = opened()
    one = make_run("a")
    two = make_run("b", namespace="aa")
    three = make_run("c", namespace="aa", model="org/other")
    _fill(store, one, two, three)
    assert store.clear(namespace="aa", model="org/tiny").records == 1
    assert [store.contains(run.key) for run in (one, two, three)] == [True, False, True]
    assert store.clear(model="org/other").freed_bytes > 0
    assert store.clear(model="org/unknown") == (0, 0)
    (store.directory / f"{'0' * 32}.safetensors").write_bytes(b"orphan")
    (store.directory / "notes.safetensors").write_bytes(b"somebody else's")
    assert store.clear().records == 1
    assert _files(store) == {"notes.safetensors"}
    _fill(store, one)
    assert same(store.load(one.key), one)


def test_clear_takes_back_what_is_still_queued(opened: Opener) -> None:
    gate, entered = threading.Event(), threading.Event()

    def throttle(_: int) -> None:
        entered.set()
        gate.wait(WAIT_S)

    store = opened(throttle=throttle)
    assert store.put(make_run("a"))
    assert store.put(make_run("b"))
    assert entered.wait(WAIT_S)
    opener = threading.Timer(0.02, gate.set)
    opener.start()
    assert store.clear().records == 1
    assert store.flush(WAIT_S)
    assert store.entries() == []
    assert _files(store) == set()
    opener.join()


def test_entries_name_what_is_stored(opened: Opener) -> None:
    clock = FakeClock(1000.0)
    store = opened(clock=clock)
    _fill(store, make_run("a", 3, first=2))
    (row,) = store.entries()
    assert (row.model, row.kind, row.first_token, row.end_token) == ("org/tiny", "run", 64, 160)
    assert (row.created_at, row.last_used_at) == (1000.0, 1000.0)
    clock.now = 2000.0
    store.touch([row.key])
    assert store.flush(WAIT_S)
    assert store.entries()[0].last_used_at == 2000.0
    assert store.entries()[0].created_at == 1000.0


def test_looking_at_a_directory_makes_and_changes_nothing(tmp_path: Path, opened: Opener) -> None:
    assert open_existing(tmp_path / "kv") is None
    assert not (tmp_path / "kv").exists()
    writing = opened(max_gb=0.5)
    run = make_run("a")
    _fill(writing, run)
    orphan = writing.directory / f"{'0' * 32}.safetensors"
    orphan.write_bytes(b"x")
    os.utime(orphan, (0, 0))
    looking = open_existing(writing.directory)
    assert isinstance(looking, DiskStore)
    assert looking.quota_bytes == GB // 2  # what the one that writes goes by
    assert [row.key for row in looking.entries()] == [run.key]
    assert orphan.exists()
    assert looking.close()
    assert writing.contains(run.key)


def test_two_stores_share_a_directory(opened: Opener) -> None:
    one, other = opened(), opened()
    run = make_run("a")
    _fill(one, run)
    assert same(other.load(run.key), run)
    other.clear()
    assert one.find(NAMESPACE, run.blocks) == [None, None]
    assert one.load(run.key) is None
    _fill(other, run)
    assert one.contains(run.key)


def test_a_thread_that_only_looks_may_come_and_go(opened: Opener) -> None:
    store = opened()
    _fill(store, make_run("a"))
    seen: list[int] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: seen.append(store.stats()["records"]))
        thread.start()
        thread.join()
    assert seen == [1, 1, 1]


def test_the_index_is_no_ones_to_wait_for(opened: Opener) -> None:
    """A write lock that another process holds stops neither lookups nor `touch`."""
    store = opened()
    run = make_run("a")
    _fill(store, run)
    other = sqlite3.connect(store.directory / "cache_index.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert store.find(NAMESPACE, run.blocks)[0] is not None
    assert same(store.load(run.key), run)
    store.touch([run.key])
    assert store.put(make_run("b"))
    assert store.contains(make_run("b").key)
    other.execute("COMMIT")
    other.close()
    assert store.flush(WAIT_S)
    assert store.stats()["write_errors"] == 0
