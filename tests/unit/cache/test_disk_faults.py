"""Claim: whatever happens to the directory, a record is there whole or it is a miss, and
nothing is raised. Crashes and races are made with real processes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import osaurus
from disk_records import NAMESPACE, FakeClock, make_run, same
from osaurus.cache import record_file
from osaurus.cache.disk import DiskStore, open_existing, open_store
from osaurus.cache.files import ORPHAN_AGE_S
from osaurus.cache.index import SCHEMA_VERSION

WAIT_S = 20.0
CHILD_S = 60.0

Opener = Callable[..., DiskStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    stores: list[DiskStore] = []

    def open_one(directory: Path = tmp_path / "kv", **options: Any) -> DiskStore:
        store = open_store(directory, **{"max_gb": 1, "min_free_bytes": 0, **options})
        assert isinstance(store, DiskStore), store
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        assert store.close(WAIT_S)


def _fill(store: DiskStore, *records: Any) -> None:
    for record in records:
        assert store.put(record)
    assert store.flush(WAIT_S)


def _path(store: DiskStore, record: Any) -> Path:
    return store.directory / f"{record.key}.safetensors"


def _run_script(script: str, *arguments: object) -> str:
    """Run Python code in a new process that finds the package and these tests' records."""
    tests = Path(__file__).parents[2]
    paths = os.pathsep.join([str(Path(osaurus.__file__).parents[1]), str(tests)])
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )
    assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stderr)
    return done.stdout


# Damage


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: _flip(path, -1),
        lambda path: _flip(path, 30),
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
    ids=["data", "header", "empty", "truncated", "longer", "noise", "zeros"],
)
def test_a_damaged_record_is_a_miss_once_and_can_be_stored_again(
    opened: Opener, damage: Callable[[Path], object]
) -> None:
    store = opened()
    run, intact = make_run("a"), make_run("b")
    _fill(store, run, intact)
    damage(_path(store, run))
    assert store.load(run.key) is None
    assert store.flush(WAIT_S)
    assert store.stats()["corruptions"] == 1
    assert not _path(store, run).exists()
    assert store.find(NAMESPACE, run.blocks) == [None, None]
    assert (store.directory / "quarantine" / f"{run.key}.safetensors").exists()
    assert same(store.load(intact.key), intact)
    _fill(store, run)
    assert same(store.load(run.key), run)


def test_a_record_under_anothers_name_is_damage(opened: Opener) -> None:
    store = opened()
    one, other = make_run("a"), make_run("b")
    _fill(store, one, other)
    assert _path(store, one).stat().st_size == _path(store, other).stat().st_size
    shutil.copy(_path(store, one), _path(store, other))
    assert store.load(other.key) is None
    assert store.stats()["corruptions"] == 1


def test_a_lost_file_is_a_miss_and_its_row_goes(opened: Opener) -> None:
    store = opened()
    run = make_run("a")
    _fill(store, run)
    _path(store, run).unlink()
    assert store.load(run.key) is None
    assert store.flush(WAIT_S)
    assert store.entries() == []
    assert store.stats() | {"load_missing": 1, "corruptions": 0} == store.stats()


def test_what_the_caller_rejects_is_put_aside(opened: Opener) -> None:
    store = opened()
    run = make_run("a")
    _fill(store, run)
    store.reject(run.key, "wrong number of layers")
    assert store.flush(WAIT_S)
    assert store.entries() == []
    assert store.load(run.key) is None
    store.reject(run.key, "again")


def test_a_shortage_of_this_process_is_not_damage(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    run = make_run("a")
    _fill(store, run)
    errors: list[Exception] = [PermissionError(13, "injected"), RuntimeError("no memory")]

    def fail(*_: object) -> None:
        raise errors.pop()

    monkeypatch.setattr("osaurus.cache.records.read_data", fail)
    assert store.load(run.key) is None
    assert store.load(run.key) is None
    monkeypatch.undo()
    assert store.stats() | {"read_errors": 2, "corruptions": 0} == store.stats()
    assert same(store.load(run.key), run)


def test_a_bad_sector_is_damage(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    run = make_run("a")
    _fill(store, run)

    def fail(*_: object) -> int:
        raise OSError(5, "injected")

    monkeypatch.setattr(record_file.os, "preadv", fail)
    assert store.load(run.key) is None
    monkeypatch.undo()
    assert store.stats()["corruptions"] == 1


def test_quarantine_is_bounded(opened: Opener) -> None:
    store = opened(max_gb=1)
    runs = [make_run(n) for n in range(20)]
    _fill(store, *runs)
    for run in runs:
        _flip(_path(store, run), -1)
        assert store.load(run.key) is None
    aside = list((store.directory / "quarantine").iterdir())
    assert len(aside) == 16
    assert store.quarantine_bytes() == sum(path.stat().st_size for path in aside)
    small = opened(store.directory, max_gb=20 * 3 * aside[0].stat().st_size / 1e9)
    assert small.quarantine_bytes() <= small.quota_bytes // 20
    small.clear()
    assert small.quarantine_bytes() == 0


def test_verify_finds_every_bad_file_and_spares_the_good(opened: Opener) -> None:
    clock = FakeClock()
    store = opened(clock=clock)
    runs = [make_run(n) for n in range(5)]
    _fill(store, *runs)
    _flip(_path(store, runs[0]), -1)
    os.truncate(_path(store, runs[1]), 100)
    _path(store, runs[2]).unlink()
    orphan = store.directory / f"{'0' * 32}.safetensors"
    orphan.write_bytes(b"x")
    os.utime(orphan, (clock.now - ORPHAN_AGE_S - 1,) * 2)
    report = store.verify()
    assert {key for key, _ in report.damaged} == {runs[0].key, runs[1].key}
    assert (report.checked, report.missing, report.orphans) == (4, 1, 1)
    assert report.unreadable == ()
    assert {row.key for row in store.entries()} == {runs[3].key, runs[4].key}
    again = store.verify()
    assert (again.checked, again.damaged, again.missing, again.orphans) == (2, (), 0, 0)


# Opening


def test_opening_makes_rows_and_files_agree(opened: Opener) -> None:
    clock = FakeClock()
    store = opened(clock=clock)
    kept, lost, cut = [make_run(name) for name in "abc"]
    _fill(store, kept, lost, cut)
    directory = store.directory
    store.close()
    _path(store, lost).unlink()
    os.truncate(_path(store, cut), 50)
    for name, age in (("1", ORPHAN_AGE_S + 1), ("2", 1.0), ("3", -ORPHAN_AGE_S - 1)):
        orphan = directory / f"{name * 32}.safetensors"
        orphan.write_bytes(b"x")
        os.utime(orphan, (clock.now - age,) * 2)
    store = opened(clock=clock)
    assert [row.key for row in store.entries()] == [kept.key]
    assert {path.name for path in directory.glob("*.safetensors")} == {
        f"{kept.key}.safetensors",
        f"{'2' * 32}.safetensors",  # another process may be about to insert its row
    }
    assert store.stats()["bytes"] == _path(store, kept).stat().st_size
    assert store.stats()["orphans_removed"] == 2


def test_temporary_files_of_the_dead_go_and_those_of_the_living_stay(opened: Opener) -> None:
    clock = FakeClock()
    store = opened(clock=clock)
    store.close()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {
        "dead": f".{'a' * 32}.{gone.pid}.{'0' * 16}.tmp",
        "alive": f".{'b' * 32}.{os.getppid()}.{'0' * 16}.tmp",
        "alive but idle": f".{'c' * 32}.{os.getppid()}.{'0' * 16}.tmp",
        "same process id, another life": f".{'d' * 32}.{os.getpid()}.{'0' * 16}.tmp",
        "not ours": f".{'e' * 31}.{gone.pid}.{'0' * 16}.tmp",
    }
    for what, name in names.items():
        (store.directory / name).write_bytes(b"x")
        age = ORPHAN_AGE_S + 1 if what == "alive but idle" else 0
        os.utime(store.directory / name, (clock.now - age,) * 2)
    opened(clock=clock)
    left = {path.name for path in store.directory.iterdir()} & set(names.values())
    assert left == {names["alive"], names["not ours"]}


def _foreign(directory: Path) -> list[Path]:
    """What a user may keep in the same directory."""
    paths = [directory / "notes.safetensors", directory / "sub" / "x", directory / "a.tmp"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    return paths


@pytest.mark.parametrize("version", [0, -1])
def test_an_older_schema_goes_with_its_records_and_nothing_else(
    opened: Opener, version: int
) -> None:
    store = opened()
    run = make_run("a")
    _fill(store, run)
    store.close()
    foreign = _foreign(store.directory)
    with sqlite3.connect(store.directory / "cache_index.db") as db:
        db.execute(f"PRAGMA user_version={version}")
    db.close()
    assert "schema" in str(open_existing(store.directory))
    assert _path(store, run).exists()
    store = opened()
    assert store.entries() == []
    assert not _path(store, run).exists()
    assert all(path.read_bytes() == b"mine" for path in foreign)
    _fill(store, run)
    assert same(store.load(run.key), run)


def test_a_newer_schema_is_left_alone_with_a_reason(opened: Opener) -> None:
    store = opened()
    run = make_run("a")
    _fill(store, run)
    store.close()
    with sqlite3.connect(store.directory / "cache_index.db") as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    db.close()
    for reason in (open_store(store.directory), open_existing(store.directory)):
        assert isinstance(reason, str)
        assert f"schema {SCHEMA_VERSION + 1}" in reason
    assert _path(store, run).exists()


@pytest.mark.parametrize("damage", ["noise", "half"])
def test_a_damaged_index_is_begun_anew(opened: Opener, damage: str) -> None:
    store = opened()
    _fill(store, *(make_run(n) for n in range(60)))
    store.close()
    foreign = _foreign(store.directory)
    path = store.directory / "cache_index.db"
    whole = path.read_bytes()
    keep = len(whole) // 2 if damage == "half" else 0
    path.write_bytes(whole[:keep] + os.urandom(len(whole) - keep))
    store = opened()
    assert store.entries() == []
    assert all(path.read_bytes() == b"mine" for path in foreign)
    _fill(store, make_run("a"))
    assert store.contains(make_run("a").key)


def test_an_index_that_breaks_while_in_use_is_a_miss(opened: Opener) -> None:
    store = opened()
    run = make_run("a")
    _fill(store, run)
    with sqlite3.connect(store.directory / "cache_index.db") as db:
        db.execute("DROP TABLE blocks")
        db.execute("DROP TABLE records")
    db.close()
    assert store.find(NAMESPACE, run.blocks) == [None, None]
    assert store.load(run.key) is None
    assert not store.contains(run.key)
    assert store.entries() == []
    store.touch([run.key])
    assert store.put(make_run("b"))
    assert store.flush(WAIT_S)
    stats = store.stats()
    assert stats["index_errors"] >= 4
    assert stats["write_errors"] >= 2
    assert not store.contains(make_run("b").key)


@pytest.mark.parametrize("what", ["a file", "below a file", "no right"])
def test_a_directory_that_cannot_be_is_a_reason(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    directory = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "kv"}.get(
        what, tmp_path / "kv"
    )
    if what == "no right":

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
    reason = open_store(directory)
    assert isinstance(reason, str)
    assert str(directory) in reason


def test_a_filesystem_without_locks_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("osaurus.cache.files.fcntl.flock", refuse)
    assert "not supported" in str(open_store(tmp_path / "kv"))


# Small and read-only volumes


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A mounted tmpfs of 4 MB."""
    place = tmp_path / "volume"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting is refused: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_volume_that_fills_up_costs_stores_and_nothing_stored(
    volume: Path, opened: Opener
) -> None:
    clock = FakeClock()
    store = opened(volume / "kv", clock=clock, max_percent=100, max_gb=None)
    runs = [make_run(n, 4, size=100_000) for n in range(8)]  # 800 kB each
    for run in runs:
        store.put(run)
        assert store.flush(WAIT_S)
    stats = store.stats()
    assert stats["stores"] + stats["write_errors"] + stats["store_refused_low_space"] <= len(runs)
    assert 3 <= stats["records"] < len(runs)
    for row in store.entries():
        assert store.load(row.key) is not None
    assert list((volume / "kv").glob(".*.tmp")) == []
    clock.now += 61
    assert store.clear().records == stats["records"]
    assert store.entries() == []
    _fill(store, runs[-1])
    assert same(store.load(runs[-1].key), runs[-1])
    store.close()


def test_a_volume_that_fills_up_under_a_write_rests_stores(volume: Path, opened: Opener) -> None:
    clock = FakeClock()
    filler = volume / "filler"

    def throttle(_: int) -> None:
        """Somebody else takes all there is, after the free space was looked at."""
        if not filler.exists():
            with filler.open("wb") as file:
                try:
                    while file.write(bytes(4096)):
                        file.flush()
                except OSError:
                    pass

    store = opened(volume / "kv", clock=clock, throttle=throttle)
    run = make_run("a", 4, size=200_000)
    assert store.put(run)
    assert store.flush(WAIT_S)
    assert store.stats() | {"write_errors": 1, "records": 0} == store.stats()
    assert not store.put(run)
    assert store.stats()["store_refused_disk_full"] == 1
    assert list((volume / "kv").glob(".*.tmp")) == []
    os.truncate(filler, 0)
    clock.now += 61
    _fill(store, run)
    assert same(store.load(run.key), run)
    store.close()


def test_a_read_only_volume_is_a_reason_and_never_an_error(volume: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    reason = open_store(volume / "kv")
    assert isinstance(reason, str)
    assert "Read-only" in reason


def test_a_volume_without_a_free_byte_is_a_reason(volume: Path) -> None:
    with (volume / "filler").open("wb") as file:
        try:
            while file.write(bytes(65536)):
                file.flush()
        except OSError:
            pass
    assert isinstance(open_store(volume / "kv"), str)


# Crashes

_CRASH = """
import os, signal, sys
from pathlib import Path
from disk_records import make_run
from osaurus.cache.disk import open_store

def die_at(wanted):
    def at(step):
        if step == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
    return at

for step in sys.argv[2].split(","):
    child = os.fork()
    if child == 0:
        at_step = die_at(step)
        store = open_store(
            Path(sys.argv[1], step), max_gb=1, min_free_bytes=0, at_step=lambda _: None
        )
        store.put(make_run("before"))
        store.flush()
        store.close()
        store = open_store(
            Path(sys.argv[1], step), max_gb=1, min_free_bytes=0, at_step=at_step,
            throttle=lambda _: at_step("half"),
        )
        store.put(make_run("a", 6, size=200_000))
        store.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (step, status)
"""

STEPS = ("created", "half", "written", "synced", "replaced", "indexed")


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory a step, in which a process was killed right after it."""
    base = tmp_path_factory.mktemp("crashed")
    _run_script(_CRASH, base, ",".join(STEPS))
    return base


@pytest.mark.parametrize("step", STEPS)
def test_a_process_killed_at_any_step_leaves_the_whole_record_or_a_miss(
    crashed: Path, step: str, opened: Opener
) -> None:
    run, before = make_run("a", 6, size=200_000), make_run("before")
    directory = crashed / step
    store = opened(directory)
    assert list(directory.glob(".*.tmp")) == []
    assert same(store.load(before.key), before)
    found = store.find(NAMESPACE, run.blocks)
    assert store.contains(run.key) == (step == "indexed")
    if step == "indexed":
        assert same(store.load(run.key), run)
        return
    assert found == [None] * 6
    assert store.load(run.key) is None
    has_file = step == "replaced"
    assert _path(store, run).exists() == has_file
    store.close()
    store = opened(directory, clock=lambda: _path(store, before).stat().st_mtime + 3600)
    assert not _path(store, run).exists()
    assert store.stats()["orphans_removed"] == has_file
    _fill(store, run)
    assert same(store.load(run.key), run)


# Races

_RACE = """
import json, os, sys
from pathlib import Path
from disk_records import NAMESPACE, make_run, same
from osaurus.cache.disk import open_store

runs = [make_run(n, size=2000) for n in range(24)]
children = []
for child in range(3):
    pid = os.fork()
    if pid == 0:
        store = open_store(
            Path(sys.argv[1]), max_gb=float(sys.argv[2]), min_free_bytes=0, queue_records=100
        )
        assert not isinstance(store, str), store
        order = runs if child == 0 else runs[::-1] if child == 1 else runs[12:] + runs[:12]
        bad = 0
        for run in order:
            store.put(run)
            store.find(NAMESPACE, run.blocks)
            loaded = store.load(run.key)
            bad += loaded is not None and not same(loaded, run)
            store.touch([run.key])
        store.flush()
        for run in order:
            loaded = store.load(run.key)
            bad += loaded is not None and not same(loaded, run)
        stats = store.stats()
        store.close()
        faults = [stats.get(name, 0) for name in ("corruptions", "write_errors", "index_errors")]
        if bad or any(faults):
            print(child, bad, faults, file=sys.stderr, flush=True)
        os._exit(bool(bad or any(faults)))
    children.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


@pytest.mark.parametrize("quota_records", [100, 8])
def test_processes_race_on_the_same_keys(
    tmp_path: Path, opened: Opener, quota_records: int
) -> None:
    store = opened(tmp_path / "measured")
    _fill(store, make_run(0, size=2000))
    size = store.stats()["bytes"]
    directory = tmp_path / "shared"
    assert _run_script(_RACE, directory, quota_records * size / 1e9) == "[0, 0, 0]\n"
    store = opened(directory)
    assert store.verify().damaged == ()
    runs = [make_run(n, size=2000) for n in range(24)]
    stored = [run for run in runs if store.contains(run.key)]
    assert len(stored) == len(store.entries())
    assert {path.name for path in directory.glob("*.safetensors")} >= {
        f"{run.key}.safetensors" for run in stored
    }
    if quota_records > len(runs):
        assert len(stored) == len(runs)
    else:
        assert 0 < len(stored) <= quota_records
