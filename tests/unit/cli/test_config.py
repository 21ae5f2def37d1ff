"""Proves what `osaurus config` shows and writes, and that a server starts as the file says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from osaurus.cli.app import run_command_line
from osaurus.cli.client import ServerClient, configured_address
from osaurus.settings.paths import server_settings
from osaurus.settings.schema import SETTINGS
from unit.cli.test_app import _run_probed


@pytest.fixture
def path() -> Path:
    return server_settings().path


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command_line(["config", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_looking_writes_nothing_and_imports_nothing_heavy(path: Path) -> None:
    for arguments in (["show"], ["get", "network.port"], ["paths"]):
        assert _run_probed(["config", *arguments]) == (0, [])
    assert not path.parent.exists()


def test_set_get_and_unset(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "set", "generation.topk", "7")
    assert (code, out) == (0, "")
    assert err == "generation.topK is 7, from the next request on\n"
    assert json.loads(path.read_text())["generation"] == {"topK": 7}
    assert json.loads(path.read_text())["concurrency"] == {"maxConcurrentSequences": "auto"}
    assert _run(capsys, "get", "generation.topK") == (0, "7\n", "from file\n")
    assert _run(capsys, "unset", "generation.topK")[0] == 0
    assert "generation" not in json.loads(path.read_text())
    assert _run(capsys, "get", "generation.topK") == (0, "null\n", "from default\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["get", "network.prt"], "did you mean network.port?"),
        (["set", "network.port", "0"], "at least 1 and at most 65535; got 0"),
        (["set", "cache.liveKVCodec", "turboquant"], "turboquant needs it"),
        (["set", "memorySafety.mode", "wild"], "performance, balanced, safe_auto"),
    ],
)
def test_a_mistake_is_one_line_and_two_and_writes_nothing(
    arguments: list[str], words: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert not path.exists()


def test_show_has_every_setting_with_value_origin_range_and_when(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(path, '{"network": {"port": 9, "apiKey": "sesame"}}')
    monkeypatch.setenv("OSAURUS_GENERATION__TOP_K", "3")
    code, out, _ = _run(capsys, "show", "--json")
    facts = json.loads(out)
    assert code == 0
    rows = {row["key"]: row for row in facts["settings"]}
    assert list(rows) == [setting.key for setting in SETTINGS]
    assert (rows["network.port"]["value"], rows["network.port"]["origin"]) == (9, "file")
    assert rows["generation.topK"]["source"] == "OSAURUS_GENERATION__TOP_K"
    assert rows["network.apiKey"]["value"] == "***"
    assert rows["cache.blockDisk.enabled"]["live"] == "next load"
    code, out, _ = _run(capsys, "show", "--changed")
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        "network.port",
        "network.apiKey",
        "generation.topK",
    ]
    assert "OSAURUS_GENERATION__TOP_K" in out
    assert "sesame" not in out


def test_what_wins_over_the_file_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OSAURUS_SERVER__PORT", "5")
    _, _, err = _run(capsys, "set", "network.port", "9")
    assert "OSAURUS_SERVER__PORT is set here and wins over the file" in err
    assert json.loads(path.read_text())["network"] == {"port": 9}
    assert _run(capsys, "get", "network.port") == (0, "5\n", "from OSAURUS_SERVER__PORT\n")
    said = _run(capsys, "set", "mtp.mode", "off")[2]
    assert "without effect here: No drafter runs yet" in said


def test_a_corrupt_file_is_put_aside_and_a_contradiction_can_be_mended(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(path, "{")
    code, _, err = _run(capsys, "show")
    assert code == 0
    assert "cannot be understood" in err
    assert ".corrupt-" in err
    _write(path, '{"cache": {"liveKVCodec": "turboquant"}}')
    code, _, err = _run(capsys, "show")
    assert code == 1
    assert "cache.turboQuantKeyBits" in err
    assert _run(capsys, "set", "cache.liveKVCodec", "native")[0] == 0
    assert _run(capsys, "show")[0] == 0


def test_reset_writes_a_fresh_file_and_asks_first(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(path, '{"network": {"port": 9}, "mine": 1}')
    assert _run(capsys, "reset")[0] == 1
    assert json.loads(path.read_text())["mine"] == 1
    assert _run(capsys, "reset", "--yes")[0] == 0
    assert json.loads(path.read_text())["concurrency"] == {"maxConcurrentSequences": "auto"}


def test_paths_follow_the_settings(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OSAURUS_MODELS_DIR")
    _write(path, '{"models": {"directory": "/somewhere"}}')
    places = json.loads(_run(capsys, "paths", "--json")[1])
    by_name = {place["name"]: place for place in places}
    assert by_name["models"]["path"] == "/somewhere"
    assert by_name["server settings"]["path"] == str(path)


@pytest.mark.slow
def test_a_preview_shows_what_the_settings_come_to_for_the_default_model(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(path, '{"concurrency": {"maxConcurrentSequences": 3}, "generation": {"topK": 4}}')
    facts = json.loads(_run(capsys, "preview", "--json")[1])
    rows = {row["id"]: row for row in facts["rows"]}
    assert rows["concurrency"]["value"] == "3"
    assert rows["top_k"]["source"] == "settings"
    assert "keys and values up to" in rows["memory"]["value"]
    assert facts["command"][-2:] == ["--max-concurrent", "3"]


def test_verbs_look_for_the_server_where_the_file_says(path: Path) -> None:
    _write(path, '{"network": {"port": 4321, "host": "::1"}}')
    assert configured_address() == "http://[::1]:4321"
    _write(path, '{"network": {"port": "x"}}')
    assert configured_address() == "http://127.0.0.1:1337"


def _serve(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "osaurus", "serve", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def _status(address: str, headers: dict[str, str]) -> int:
    import httpx2

    return httpx2.get(f"{address}/health", headers=headers).status_code


def test_a_server_starts_as_the_file_says_and_flags_win(path: Path, free_port: int) -> None:
    settings: dict[str, Any] = {
        "network": {
            "port": free_port,
            "host": "0.0.0.0",
            "expose": True,
            "allowedHosts": ["house.example"],
            "corsOrigins": ["http://page.example"],
            "logLevel": "warning",
        },
        "concurrency": {"maxConcurrentSequences": 6},
        "mine": 1,
    }
    _write(path, json.dumps(settings))
    process = _serve("--max-concurrent", "2")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == f"osaurus is ready on http://0.0.0.0:{free_port}\n"
    address = f"http://127.0.0.1:{free_port}"
    with ServerClient(address) as client:
        health = client.health()
        assert health is not None
        assert health["http_inference_limit"] == 2 * 8 + 4
    assert _status(address, {"Host": "house.example"}) == 200
    assert _status(address, {"Host": "other.example"}) == 403
    assert _status(address, {"Origin": "http://page.example"}) == 200
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "GET /health" not in err  # those lines are information
    assert "mine is not known and was kept" in err
    assert json.loads(path.read_text()) == settings


def test_a_first_server_writes_a_file_that_says_auto(path: Path) -> None:
    process = _serve("--port", "0")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("osaurus is ready")
    process.terminate()
    process.communicate(timeout=60)
    assert json.loads(path.read_text())["concurrency"] == {"maxConcurrentSequences": "auto"}


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ('{"network": {"port": 0}}', {}, "network.port: must be a whole number"),
        ('{"cache": {"liveKVCodec": "turboquant"}}', {}, "cache.turboQuantKeyBits"),
        ('{"tools": {"toolParserOverride": "x"}}', {}, "tools.toolParserOverride"),
        ("{}", {"OSAURUS_GENERATION__TOP_P": "7"}, "OSAURUS_GENERATION__TOP_P"),
    ],
)
def test_a_bad_value_stops_the_start_with_its_name(
    text: str, environment: dict[str, str], words: str, path: Path
) -> None:
    _write(path, text)
    process = _serve("--port", "0", **environment)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert words in err
    assert "Traceback" not in err
