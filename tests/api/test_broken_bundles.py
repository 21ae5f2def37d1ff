"""Claim: bundles that are broken, unfinished or hostile are refused in one line at both faces: a
4xx over HTTP, exit code 1 at the command line. Nothing is left of them, and others are served.
"""

from __future__ import annotations

import gc
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from osaurus.cli.app import run_command_line
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig
from unit.bundle.made import llama_tensors, write_folder
from unit.models.test_broken_bundles import FOLDERS, GGUFS

OPTIONS = LoadOptions(
    device="cpu", disk_cache=False, engine=EngineConfig(kv_budget_bytes=4_000_000)
)


def _break(root: Path) -> dict[str, list[str]]:
    """Every broken bundle under `root`, by the name it is asked for, and the words due."""
    expected: dict[str, list[str]] = {}
    for name, (change, _, words) in FOLDERS.items():
        path = root / "folders" / name.replace(" ", "-")
        change(write_folder(path, tensors=llama_tensors()))
        expected[str(path)] = words
    for name, (change, _, words) in GGUFS.items():
        path = root / "ggufs" / name.replace(" ", "-") / "m.gguf"
        path.parent.mkdir(parents=True)
        change(path)
        expected[str(path)] = words
    return expected


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str]]]:
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(tmp_path / "models"))
    yield _break(tmp_path)
    gc.collect()
    if (maps := Path("/proc/self/maps")).exists():
        assert str(tmp_path / "folders") not in maps.read_text()
        assert str(tmp_path / "ggufs") not in maps.read_text()
        links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
        assert not [link for link in links if os.readlink(link).startswith(str(tmp_path))]


def _ask(url: str, model: str) -> httpx2.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return httpx2.post(f"{url}/v1/chat/completions", json={**body, "model": model}, timeout=60)


def test_over_http_each_is_a_4xx_of_one_line_and_others_are_served(
    broken: dict[str, list[str]], tmp_path: Path
) -> None:
    good = str(write_folder(tmp_path / "good", tensors=llama_tensors()))
    source = BundleSource(OPTIONS, allow_paths=True)
    before = threading.active_count()
    with running_server(source, ServerConfig(port=0, drain_s=0.2)) as url:
        assert _ask(url, good).status_code == 200
        for model, words in broken.items():
            answer = _ask(url, model)
            assert 400 <= answer.status_code < 500, (model, answer.text)
            message = answer.json()["error"]["message"]
            assert "\n" not in message
            for word in words:
                assert word in message, (model, message)
        assert _ask(url, good).status_code == 200
        health = httpx2.get(f"{url}/health").json()
        assert health["loaded"] == ["good"]
        assert health["inflight"] == {}
    assert threading.active_count() <= before
    assert len(broken) >= 20


def test_at_the_command_line_each_is_one_line_and_code_1(
    broken: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for model, words in broken.items():
        assert run_command_line(["run", model, "Hi", "--no-disk-cache"]) == 1, model
        shown = capsys.readouterr()
        assert shown.out == ""
        said = [line for line in shown.err.splitlines() if line.startswith("osaurus: ")]
        assert len(said) == 1, shown.err
        assert "Traceback" not in shown.err
        for word in words:
            assert word in said[0], (model, said)
