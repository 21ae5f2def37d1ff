"""Proves which server a verb speaks to, and that the one it starts itself is gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from osaurus.cli import connection
from osaurus.cli.client import ServerClient
from osaurus.cli.connection import connect
from osaurus.cli.options import cache_flags
from osaurus.errors import ModelNotFound
from unit.bundle.made import llama_tensors, write_folder
from unit.cli.scripted_server import scripted_server


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models for which a download was offered."""
    names: list[str] = []
    monkeypatch.setattr(connection, "_offer", lambda model, yes: names.append(model))
    return names


def test_a_running_server_that_knows_the_model_is_used_as_it_is(
    offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_server(lambda _: []) as server:
        monkeypatch.setenv("OSAURUS_SERVER__PORT", server.address.rpartition(":")[2])
        with connect("m", address=None, assume_yes=False) as client:
            assert client.address == server.address
        assert offered == []
        server.models = set()
        with connect("m", address=None, assume_yes=False) as client:
            assert client.address == server.address
        assert offered == ["m"]


def test_flags_that_another_server_cannot_heed_are_mentioned(
    offered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, words in (
        (cache_flags(None, True, None), "--no-disk-cache has no effect"),
        (cache_flags(Path("/x"), False, "none"), "--kv-mode, --kv-cache-dir have no effect"),
        ({}, ""),
        (None, ""),
    ):
        with connect("m", address="http://localhost:9", assume_yes=True, flags=flags):
            shown = capsys.readouterr().err
            assert words in shown
            assert bool(words) == bool(shown)


def test_an_address_of_the_users_is_never_second_guessed(offered: list[str]) -> None:
    with connect("m", address="http://localhost:9", assume_yes=True) as client:
        assert client.address == "http://localhost:9"
    assert offered == []


def test_without_a_server_one_runs_in_this_process_as_long_as_needed(
    offered: list[str], monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("OSAURUS_SERVER__PORT", str(free_port))
    before = set(threading.enumerate())
    with connect("m", address=None, assume_yes=False) as client:
        assert client.health() is not None
        assert client.address.startswith("http://127.0.0.1:")
        address = client.address
    assert offered == ["m"]
    assert {t for t in threading.enumerate() if not t.daemon} <= before
    with ServerClient(address) as client:
        assert client.health() is None


def test_a_model_named_by_its_path_is_loaded_here_beside_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "made", tensors=llama_tensors())
    with scripted_server(lambda _: []) as server:
        monkeypatch.setenv("OSAURUS_SERVER__PORT", server.address.rpartition(":")[2])
        flags = cache_flags(None, True, None)
        with connect(str(folder), address=None, assume_yes=False, flags=flags) as client:
            assert client.address != server.address
            deltas = client.stream_chat(
                model=str(folder),
                messages=[{"role": "user", "content": "Hi"}],
                options={"max_tokens": 2},
            )
            assert "length" in [delta.finish_reason for delta in deltas]


def test_a_model_that_cannot_be_fetched_starts_no_server(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("OSAURUS_SERVER__PORT", str(free_port))
    with (
        pytest.raises(ModelNotFound),
        connect("nonsense", address=None, assume_yes=True),
    ):
        raise AssertionError("no connection may come")


def _serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "osaurus", "serve", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_announces_its_address_and_ends_cleanly_when_told(number: int) -> None:
    process = _serve("--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("osaurus is ready on http://127.0.0.1:")
    with ServerClient(line.split()[-1]) as client:
        assert client.health() is not None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    assert "GET /health 200" in err
    assert "Traceback" not in err
    assert err.endswith("osaurus: stopped\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "expose"),
        (["--max-concurrent", "0"], "--max-concurrent"),
        (["--port", "70000"], "65535"),
        (["--compute-mode", "int1"], "compute-mode"),
        (["--quantize", "int3"], "quantize"),
        (["--kv-mode", "turbo(9,9)"], "--kv-mode: kv mode turbo(9,9): key and value bits"),
        (["--kv-mode", "tiny"], "write none, engine_selected, turbo(3,3) or affine(8,64)"),
        (["--kv-cache-dir", "/dev/null"], "--kv-cache-dir: /dev/null is no directory"),
        (["--kv-cache-dir", "kv", "--no-disk-cache"], "--no-disk-cache"),
    ],
)
def test_serve_refuses_what_it_cannot_mean(arguments: list[str], words: str) -> None:
    process = _serve(*arguments)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert words in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_one_question_goes_from_the_command_line_through_http_to_the_real_model(
    free_port: int,
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "osaurus", "run", "default"),
            *("What is the capital of France?", "--temperature", "0", "--json"),
            "--no-disk-cache",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OSAURUS_SERVER__PORT": str(free_port)},
        check=True,
    )
    answer = json.loads(done.stdout)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["prompt_tokens"] == 37
    assert answer["completion_tokens"] > 1
