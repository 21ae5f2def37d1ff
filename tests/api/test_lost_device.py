"""Claim: a device that answers nothing more is told as that, by requests and by readiness, and is
held against no model; an error of the device that passes is the load's own.

The device is a stand-in: its errors are raised where a CUDA device raises them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from osaurus.engine import core
from osaurus.engine.runner import Runner
from osaurus.errors import DeviceLost
from osaurus.models import registry
from osaurus.runtime import lost_device
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig
from tiny import save_tiny
from unit.bundle.made import byte_level_tokenizer

WORDS = "CUDA error: device-side assert triggered"
OPTIONS = LoadOptions(
    device="cpu", disk_cache=False, engine=EngineConfig(kv_budget_bytes=4_000_000)
)


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError(f"{WORDS}\nand more words")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(tmp_path / "models"))
    folder = tmp_path / "models/org/tiny"
    backend = byte_level_tokenizer()
    save_tiny(folder, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with running_server(BundleSource(OPTIONS), ServerConfig(port=0, drain_s=0.2)) as url:
        yield url


def _ask(url: str) -> httpx2.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def _break(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on whatever the device is asked for fails."""
    monkeypatch.setattr(Runner, "prefill", _fail)
    monkeypatch.setattr(core, "build_pools", _fail)
    monkeypatch.setattr(registry, "load_model", _fail)


def test_a_lost_device_is_told_to_clients_and_to_the_supervisor(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ask(url).status_code == 200
    assert httpx2.get(f"{url}/health/ready").status_code == 200
    with monkeypatch.context() as broken:
        _break(broken)
        broken.setattr(lost_device, "answers", lambda device: False)
        assert WORDS in _ask(url).json()["error"]["message"]  # of the engine that met it
        for _ in range(2):
            refused = _ask(url)
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["code"] == "device_lost"
            assert f"({WORDS}); restart the server" in error["message"]
            assert "\n" not in error["message"]
    ready = httpx2.get(f"{url}/health/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "device_lost")
    health = httpx2.get(f"{url}/health").json()
    assert (health["ready"], health["loaded"], health["inflight"]) == (False, [], {})
    assert "answers no more" in health["engine_last_error"]
    listed = httpx2.get(f"{url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["org/tiny"]


def test_a_device_that_still_answers_is_not_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        _break(broken)
        refused = _ask(url)
    assert refused.json()["error"]["code"] == "bundle_error"
    assert WORDS in refused.json()["error"]["message"]
    assert httpx2.get(f"{url}/health/ready").status_code == 200


def test_only_errors_of_the_device_ask_whether_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_device, "answers", lambda device: False)
    lost = pytest.raises(DeviceLost, match="cuda:1 answers no more")
    with lost, lost_device.telling_a_lost_device("cuda:1"):
        _fail()
    for error in (RuntimeError("shape mismatch"), ValueError(WORDS), MemoryError()):
        with pytest.raises(type(error)) as caught, lost_device.telling_a_lost_device("cuda"):
            raise error
        assert caught.value is error
