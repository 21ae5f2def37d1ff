"""Proves `cache`: what is stored is shown, checked and deleted, beside a server that uses it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_records import FakeClock, make_run, make_snapshot, same
from osaurus.cache.disk import DiskStore, open_store
from osaurus.cli.app import run_command_line

WAIT_S = 20.0

RUN = make_run("a", 8)
SNAPSHOT = make_snapshot("a", 8)
OTHER = make_run("b", 2, first=8, model="org/other")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr("osaurus.bundle.hub.installed_path", lambda _: None)
    return tmp_path / "home"


@pytest.fixture
def server(home: Path) -> Iterator[DiskStore]:
    """The store of a server that runs; it put three records, OTHER last."""
    store = open_store(home / "cache" / "kv", max_gb=1, min_free_bytes=0, clock=FakeClock())
    assert isinstance(store, DiskStore)
    for record in (RUN, SNAPSHOT, OTHER):
        assert store.put(record)
        assert store.flush(WAIT_S)
    yield store
    assert store.close(WAIT_S)


def _damage(server: DiskStore, key: str) -> None:
    path = server.directory / f"{key}.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


def _json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert run_command_line(["cache", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_stats_say_how_much_of_what(server: DiskStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["cache", "stats"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == f"directory   {server.directory}"
    assert lines[1] == "records     2 runs of blocks, 1 snapshots"
    assert lines[2].endswith(" of 1.0 GB")
    assert lines[5].split() == ["MODEL", "RECORDS", "SIZE", "LAST", "USED"]
    assert [line.split()[:2] for line in lines[6:]] == [["org/other", "1"], ["org/tiny", "2"]]
    assert shown.err == ""
    found = _json(capsys, "stats")
    assert set(found) == {
        "directory", "records", "runs", "snapshots", "bytes", "quota_bytes", "quarantine_bytes",
        "models",
    }  # fmt: skip
    assert found["bytes"] == server.stats()["bytes"]
    assert found["quota_bytes"] == server.quota_bytes


def test_list_shows_every_record_the_last_used_first(
    server: DiskStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KEY", "MODEL", "KIND", "TOKENS", "SIZE", "LAST", "USED"]
    assert [line.split()[:4] for line in lines[1:]] == [
        [OTHER.key, "org/other", "run", "256-320"],
        [RUN.key, "org/tiny", "run", "0-256"],
        [SNAPSHOT.key, "org/tiny", "snapshot", "at"],
    ]
    found = _json(capsys, "list")
    assert [row["key"] for row in found] == [OTHER.key, RUN.key, SNAPSHOT.key]
    assert found[0] | {"model": "org/other", "first_token": 256, "end_token": 320} == found[0]
    assert found[0]["created"] == "2027-01-15T08:00:00+00:00"


def test_clear_of_one_model_leaves_the_others(
    server: DiskStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["cache", "clear", "org/tiny"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("deleted 2 records, ")
    assert [server.contains(record.key) for record in (RUN, SNAPSHOT, OTHER)] == [
        False,
        False,
        True,
    ]
    assert server.load(RUN.key) is None
    assert same(server.load(OTHER.key), OTHER)


def test_clear_of_everything_and_the_server_goes_on(
    server: DiskStore, capsys: pytest.CaptureFixture[str]
) -> None:
    held = server.load(RUN.key)
    assert _json(capsys, "clear") == {"records": 3, "bytes": pytest.approx(0, abs=20_000)}
    assert same(held, RUN)
    assert server.entries() == []
    assert list(server.directory.glob("*.safetensors")) == []
    assert server.put(RUN)
    assert server.flush(WAIT_S)
    assert same(server.load(RUN.key), RUN)


def test_a_model_of_which_nothing_is_stored_is_named_with_those_there_are(
    server: DiskStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["cache", "clear", "org/unknown"]) == 1
    assert "the KV cache holds org/other, org/tiny" in capsys.readouterr().err
    assert len(server.entries()) == 3


def test_verify_is_one_when_there_was_damage_and_zero_after(
    server: DiskStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["cache", "verify"]) == 0
    assert "checked 3 records" in capsys.readouterr().err
    _damage(server, RUN.key)
    assert run_command_line(["cache", "verify"]) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{RUN.key}  damaged: the checksum does not match\n"
    assert shown.err.endswith("1 damaged\n")
    assert server.find(RUN.namespace, RUN.blocks) == [None] * 8
    assert _json(capsys, "verify") | {"checked": 2, "damaged": [], "missing": 0} == _json(
        capsys, "verify"
    )
    assert _json(capsys, "stats")["quarantine_bytes"] > 0


def test_verify_as_json_names_the_problem(
    server: DiskStore, capsys: pytest.CaptureFixture[str]
) -> None:
    _damage(server, OTHER.key)
    found = _json(capsys, "verify", code=1)
    assert found["damaged"] == [{"key": OTHER.key, "problem": "the checksum does not match"}]


def test_where_nothing_is_stored_nothing_is_made(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("stats", "list", "clear", "verify"):
        assert run_command_line(["cache", verb]) == 0
        assert run_command_line(["cache", verb, "--json"]) == 0
    assert run_command_line(["cache", "clear", "org/tiny"]) == 1
    assert "holds nothing" in capsys.readouterr().err
    assert not home.exists()


def test_another_directory_may_be_named(
    tmp_path: Path, server: DiskStore, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    assert _json(capsys, "stats", "--kv-cache-dir", elsewhere)["records"] == 0
    assert _json(capsys, "stats", "--kv-cache-dir", str(server.directory))["records"] == 3


@pytest.mark.parametrize("verb", ["stats", "list", "clear", "verify"])
def test_an_index_from_a_newer_version_is_left_alone(
    server: DiskStore, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = server.directory / "cache_index.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    assert run_command_line(["cache", verb]) == 1
    assert "schema 99" in capsys.readouterr().err
    assert len(list(server.directory.glob("*.safetensors"))) == 3


def test_no_verb_of_it_imports_torch(server: DiskStore) -> None:
    script = (
        "import sys\n"
        "from osaurus.cli.app import run_command_line\n"
        "for verb in ('stats', 'list', 'verify', 'clear'):\n"
        "    assert run_command_line(['cache', verb]) == 0\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)
    assert server.entries() == []
