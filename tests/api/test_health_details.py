"""Every field of `/health`, and what it says of the load that was tried last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.conftest import Running
from osaurus.runtime.live import LiveSettings
from osaurus.runtime.load import BundleSource
from osaurus.server.serve import ServerConfig, running_server
from osaurus.settings.store import SettingsStore
from tiny import save_tiny
from unit.bundle.made import byte_level_tokenizer

HI = [{"role": "user", "content": "hi"}]
FIELDS = {
    "status", "timestamp", "loaded", "current_model", "inflight", "resident_models",
    "instance_id", "loading", "inflight_load_bytes", "http_inflight", "http_inference_limit",
    "chat_active", "engine_last_error", "ram_feasibility", "ready", "default_model",
    "default_model_error", "load_errors",
}  # fmt: skip
FEASIBILITY = {
    "model", "verdict", "incoming_weights_bytes", "incoming_load_footprint_bytes",
    "resident_weights_bytes", "kv_headroom_bytes", "projected_bytes", "physical_memory_bytes",
    "available_memory_bytes", "required_available_bytes", "soft_limit_bytes", "hard_limit_bytes",
}  # fmt: skip


def _health(url: str) -> dict[str, Any]:
    return httpx2.get(f"{url}/health").json()


def test_every_field_is_there_before_anything_was_loaded(running: Running) -> None:
    health = _health(running.url)
    assert health.keys() >= FIELDS
    assert health["status"] == "healthy"
    empty: dict[str, Any] = {
        "loaded": [], "current_model": None, "inflight": {}, "resident_models": [], "loading": [],
        "inflight_load_bytes": 0, "http_inflight": 0, "engine_last_error": None,
        "ram_feasibility": None, "default_model": None, "default_model_error": None,
    }  # fmt: skip
    assert {name: health[name] for name in empty} == empty
    assert running.source.loads == []  # looking loads nothing


def test_each_process_has_an_id_of_its_own_that_stays(running: Running, start: Any) -> None:
    first = _health(running.url)["instance_id"]
    assert _health(running.url)["instance_id"] == first
    assert _health(start().url)["instance_id"] != first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models/org/tiny"
    backend = byte_level_tokenizer()
    save_tiny(folder, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_the_thresholds_judge_the_load_that_was_tried_last(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "s.json"
    quiet = {"cache": {"blockDisk": {"enabled": False}}, "performance": {"kvBudgetMB": 4}}
    path.write_text(json.dumps(quiet))
    source = BundleSource(allow_paths=True)
    live = LiveSettings(SettingsStore(path, environment={}, legacy={}), source)
    with running_server(source, ServerConfig(port=0, drain_s=0.2, live=live)) as url:

        def ask(**residency: float) -> dict[str, Any]:
            path.write_text(json.dumps({**quiet, "residency": residency}))
            body = {"model": str(folder), "messages": HI, "max_tokens": 2}
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200
            return _health(url)["ram_feasibility"]

        found = ask()
        assert found.keys() == FEASIBILITY
        assert found["verdict"] == "ok"
        assert found["model"].endswith("tiny")
        assert found["resident_weights_bytes"] == 0
        needed = found["incoming_load_footprint_bytes"]
        assert 0 < found["incoming_weights_bytes"] < needed == found["projected_bytes"]
        assert 0 < found["kv_headroom_bytes"] <= 4_000_000
        physical = found["physical_memory_bytes"]
        assert found["soft_limit_bytes"] == int(0.8 * physical)
        share = needed / physical
        assert ask(loadRAMSoftThreshold=share / 2)["verdict"] == "tight"
        hard = ask(loadRAMSoftThreshold=share / 4, loadRAMHardThreshold=share / 2)
        assert (hard["verdict"], hard["hard_limit_bytes"]) == ("refused", int(share / 2 * physical))
