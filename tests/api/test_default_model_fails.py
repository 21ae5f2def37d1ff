"""A default model that cannot load (field case F51): the server starts all the same, says why,
and serves the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.runtime.model import Listing, ModelContainer
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig
from tiny import save_tiny
from unit.bundle.made import byte_level_tokenizer

HI = [{"role": "user", "content": "hi"}]
OPTIONS = LoadOptions(
    device="cpu", disk_cache=False, engine=EngineConfig(kv_budget_bytes=4_000_000)
)


class CountingSource(BundleSource):
    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self.loads: list[str] = []

    def load(self, listing: Listing) -> ModelContainer:
        self.loads.append(listing.model_id)
        return super().load(listing)


def _model(folder: Path) -> None:
    backend = byte_level_tokenizer()
    save_tiny(folder, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def _config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _unknown(folder: Path) -> None:
    _config(folder, model_type="frobnicator9", architectures=["Frobnicator9ForCausalLM"])


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _odd_bits(folder: Path) -> None:
    _config(folder, quantization={"bits": 7, "group_size": 64})


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "models"
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(root))
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))
    for name in ("bad", "good"):
        _model(root / "org" / name)
    return root / "org"


@pytest.mark.parametrize(
    ("damage", "word"),
    [(_unknown, "frobnicator9"), (_no_tokenizer, "tokenizer"), (_odd_bits, "7")],
)
def test_the_server_starts_says_why_and_serves_the_others(
    models: Path, damage: Callable[[Path], None], word: str
) -> None:
    damage(models / "bad")
    for _ in range(2):  # a restart is no different
        source = CountingSource()
        config = ServerConfig(port=0, drain_s=0.2, preload="org/bad")
        with running_server(source, config) as url, httpx2.Client(base_url=url, timeout=60) as http:

            def ask(model: str, http: httpx2.Client = http) -> httpx2.Response:
                body = {"model": model, "messages": HI, "max_tokens": 2}
                return http.post("/v1/chat/completions", json=body)

            while not http.get("/health").json()["ready"]:
                pass
            health = http.get("/health").json()
            assert health["default_model"] == "org/bad"
            reason = health["default_model_error"]
            assert word in reason
            assert "\n" not in reason
            assert health["engine_last_error"] == health["load_errors"]["org/bad"] == reason
            listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
            assert "org/good" in listed
            assert "org/bad" not in listed

            for _ in range(3):
                refused = ask("org/bad")
                assert refused.status_code in (400, 503)
                assert refused.json()["error"]["message"] == reason
            assert source.loads == ["org/bad"]  # tried once
            assert ask("org/good").status_code == 200
            assert http.get("/health").json()["loaded"] == ["org/good"]


def test_a_default_that_was_mended_loads_at_the_next_request(models: Path) -> None:
    original = (models / "bad/config.json").read_text()
    _unknown(models / "bad")
    config = ServerConfig(port=0, drain_s=0.2, preload="org/bad")
    with running_server(CountingSource(), config) as url:
        while not httpx2.get(f"{url}/health").json()["ready"]:
            pass
        (models / "bad/config.json").write_text(original)
        listed = httpx2.get(f"{url}/v1/models").json()["data"]
        assert "org/bad" in [model["id"] for model in listed]
        body = {"model": "org/bad", "messages": HI, "max_tokens": 2}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        health = httpx2.get(f"{url}/health").json()
        assert (health["default_model"], health["default_model_error"]) == ("org/bad", None)
        assert health["load_errors"] == {}


def test_a_default_that_is_nowhere_is_said_too(models: Path) -> None:
    config = ServerConfig(port=0, drain_s=0.2, preload="org/nowhere")
    with running_server(CountingSource(), config) as url:
        while not httpx2.get(f"{url}/health").json()["ready"]:
            pass
        health = httpx2.get(f"{url}/health").json()
        assert health["default_model"] == "org/nowhere"
        assert "'org/nowhere' not found" in health["default_model_error"]
