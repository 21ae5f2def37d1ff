"""What a changed settings file and the settings endpoints do to a server that runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.conftest import Running, Start
from api.scripted_engine import Hold, Say, ScriptedEngine, ScriptedSource, Step
from osaurus.errors import InvalidField, ModelNotFound
from osaurus.runtime.live import LiveSettings
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server import auth
from osaurus.server.serve import ServerConfig, running_server
from osaurus.settings.keys import seal
from osaurus.settings.load import Flag
from osaurus.settings.schema import BY_KEY
from osaurus.settings.store import SettingsStore
from osaurus.types.engine import GenerationRequest
from tiny import save_tiny
from unit.bundle.made import byte_level_tokenizer

HI = [{"role": "user", "content": "hi"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=0;\n"


class Served:
    """A server over `path` with model "m"."""

    def __init__(self, running: Running, path: Path, live: LiveSettings) -> None:
        self.running = running
        self.path = path
        self.live = live
        self.source = running.source

    def write(self, **sections: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(sections))
        temporary.replace(self.path)

    def ask(self, **fields: Any) -> GenerationRequest:
        self.running.client().chat.completions.create(
            **{"model": "m", "messages": HI, **fields}  # type: ignore[arg-type]
        )
        return self.source.engines["m"].requests[-1]

    def call(
        self, method: str, path: str = "runtime-settings", body: Any = None, **more: Any
    ) -> Any:
        url = f"{self.running.url}/admin/{path}"
        response = httpx2.request(method, url, json=body, **more)
        return response.status_code, response.json()


@pytest.fixture
def served(start: Start, tmp_path: Path) -> Iterator[Served]:
    with _serving(start, tmp_path) as served:
        yield served


@contextmanager
def _serving(start: Start, tmp_path: Path, **more: Any) -> Iterator[Served]:
    script = more.pop("script", lambda request, index: [Say("Hello!")])
    engines = {"m": ScriptedEngine(script)}

    def make_engine(name: str) -> ScriptedEngine:
        if engines[name].capacity_snapshot().is_shutdown:
            engines[name] = ScriptedEngine(script)
        return engines[name]

    source = ScriptedSource(
        engines, sampling_defaults={"temperature": 0.3, "top_p": 0.9}, make_engine=make_engine
    )
    source.last_plan = None  # type: ignore[attr-defined]
    path = tmp_path / "server-runtime.json"
    store = SettingsStore(path, environment={}, legacy={}, **more)
    live = LiveSettings(store, source)  # type: ignore[arg-type]
    running = start(source=source, config=ServerConfig(port=0, drain_s=0.2, live=live))
    yield Served(running, path, live)


def test_sampling_is_the_requests_then_the_users_then_the_bundles(served: Served) -> None:
    assert (served.ask().params.temperature, served.ask().params.top_p) == (0.3, 0.9)
    served.write(
        generation={
            "temperature": 0.7,
            "topK": 5,
            "minP": 0.1,
            "repetitionPenalty": 1.2,
            "maxTokens": 12,
            "topP": 0.8,
        }
    )
    params = served.ask().params
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.8, 5)
    assert (params.min_p, params.repetition_penalty, params.max_tokens) == (0.1, 1.2, 12)
    params = served.ask(temperature=0.1, max_tokens=3).params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.1, 0.8, 3)
    served.write(generation={"topP": None})
    assert served.ask().params.top_p == 0.9
    assert served.source.loads == ["m"]


def test_the_batch_size_changes_with_the_next_request_and_no_load(served: Served) -> None:
    for sections, size in (
        ({"concurrency": {"maxConcurrentSequences": 5}}, 5),
        ({"concurrency": {"maxConcurrentSequences": None}}, 1),
        ({"memorySafety": {"customMaxConcurrentSequences": 7}}, 7),
        ({"concurrency": {"maxConcurrentSequences": 6, "continuousBatching": False}}, 1),
        ({"concurrency": {"maxConcurrentSequences": 40}}, 32),
    ):
        served.write(**sections)
        served.ask()
        (row,) = httpx2.get(f"{served.running.url}/health").json()["resident_models"]
        assert row["max_batch_size"] == size
        limit = httpx2.get(f"{served.running.url}/health").json()["http_inference_limit"]
        assert limit == 8 * size + 4
    assert served.source.loads == ["m"]


def test_a_billing_line_is_left_in_as_soon_as_the_setting_says_so(served: Served) -> None:
    system = {"role": "system", "content": BILLING + "Be brief."}
    short = len(served.ask(messages=[system, *HI]).token_ids)
    served.write(prompt={"keepAttributionLine": True})
    assert len(served.ask(messages=[system, *HI]).token_ids) == short + len(BILLING)


def test_residency_and_guardrails_reach_the_runtime(served: Served) -> None:
    served.write(
        residency={
            "mode": "never",
            "seconds": 60,
            "evictionPolicy": "manual_multi_model",
            "loadRAMSoftThreshold": 0.9,
            "loadRAMHardThreshold": 0.5,
        },
        guardrails={"degenerationDetection": True},
    )
    served.ask()
    now = served.live.runtime
    assert (now.residency.mode, now.residency.seconds) == ("never", 60)
    assert now.eviction == "manual_multi_model"
    assert now.ram_soft_threshold == 0.5
    assert now.degeneration_detection


def test_what_a_load_reads_makes_idle_models_load_anew(served: Served) -> None:
    served.ask()
    served.write(performance={"maxContextTokens": 512})
    served.ask()
    assert served.source.loads == ["m", "m"]
    options: LoadOptions = served.source.options  # type: ignore[attr-defined]
    assert options.engine.max_context_tokens == 512
    served.write(performance={"maxContextTokens": 512}, generation={"topK": 3})
    served.ask()
    assert served.source.loads == ["m", "m"]


def test_a_stream_that_runs_is_not_cut_by_a_change(start: Start, tmp_path: Path) -> None:
    def script(request: GenerationRequest, index: int) -> list[Step]:
        return [Say("one "), Hold("gate"), Say("two")]

    with _serving(start, tmp_path, script=script) as served:
        client = served.running.client()
        stream = client.chat.completions.create(model="m", messages=HI, stream=True)  # type: ignore[arg-type]
        served.running.engine.wait_until_held("gate")
        status, body = served.call("PATCH", body={"performance": {"maxContextTokens": 99}})
        assert (status, body["effects"]["loaded_model_refresh_needed"]) == (200, True)
        served.running.engine.open_gate("gate")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == "one two"


def test_a_file_that_becomes_wrong_changes_nothing_and_is_named(served: Served) -> None:
    served.write(generation={"topK": 4})
    assert served.ask().params.top_k == 4
    served.write(generation={"topK": "many"})
    assert served.ask().params.top_k == 4
    assert "generation.topK" in served.call("GET")[1]["problem"]


def test_the_endpoint_shows_values_origins_and_what_they_come_to(
    start: Start, tmp_path: Path
) -> None:
    flags = {"concurrency.maxConcurrentSequences": Flag(name="--max-concurrent", value=3)}
    with _serving(start, tmp_path, flags=flags) as served:
        served.write(network={"apiKey": "sesame"}, generation={"topK": 4})
        status, body = served.call("GET")
        assert status == 200
        assert body["settings"]["generation"]["topK"] == 4
        assert body["origins"]["generation.topK"] == "file"
        assert body["origins"]["concurrency.maxConcurrentSequences"] == "flag"
        assert body["resolved"]["max_concurrent_sequences"] == 3
        assert body["settings"]["network"]["apiKey"] == "***"
        assert (body["problem"], body["override_active"]) == (None, False)


def test_a_document_that_is_put_is_kept_and_counts(served: Served) -> None:
    served.write(mine={"x": 1}, network={"apiKey": "sesame"})
    document = served.call("GET")[1]["settings"]
    document["generation"]["topK"] = 9
    document["cache"]["pagedKV"]["blockSize"] = 16
    status, body = served.call("PUT", body=document)
    assert status == 200
    assert body["settings"]["generation"]["topK"] == 9
    assert body["previous_settings"]["generation"]["topK"] is None
    assert body["effects"]["loaded_model_refresh_needed"] is True
    assert body["effects"]["runtime_config_invalidated"] is True
    assert set(body["effects"]["changed"]) == {"generation.topK", "cache.pagedKV.blockSize"}
    saved = json.loads(served.path.read_text())
    assert saved["mine"] == {"x": 1}
    assert saved["network"]["apiKey"] == seal("sesame")
    assert served.ask().params.top_k == 9


def test_a_patch_changes_what_it_names(served: Served) -> None:
    served.write(mine=1, generation={"topK": 2, "minP": 0.5})
    status, body = served.call("PATCH", body={"generation": {"topK": None}, "other": {"y": 2}})
    assert (status, body["effects"]["changed"]) == (200, ["generation.topK"])
    saved = json.loads(served.path.read_text())
    assert saved["generation"] == {"topK": None, "minP": 0.5}
    assert (saved["mine"], saved["other"]) == (1, {"y": 2})
    body = served.call("PATCH", body={"memorySafety": {"slider": 1}})[1]
    assert body["settings"]["memorySafety"]["mode"] == "balanced"
    body = served.call("PATCH", body={"memorySafety": {"mode": "safe_auto", "slider": 1}})[1]
    assert body["settings"]["memorySafety"]["mode"] == "safe_auto"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, None),
        ({"generation": {"topK": "x"}}, "generation.topK"),
        ({"cache": {"liveKVCodec": "turboquant"}}, "cache.turboQuantKeyBits"),
        ({"network": {"port": 9}}, "network.port"),
        ({"tools": {"toolParserOverride": "nonsense"}}, "tools.toolParserOverride"),
    ],
)
@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_what_is_wrong_is_a_400_that_names_it_and_nothing_is_saved(
    method: str, body: Any, field: str | None, served: Served
) -> None:
    served.write(mine=1)
    status, answer = served.call(method, body=body)
    assert status == 400
    assert answer["error"].get("param") == field
    assert json.loads(served.path.read_text()) == {"mine": 1}


def test_a_put_lists_everything_that_is_wrong(served: Served) -> None:
    body = {
        "generation": {"topK": "x", "minP": 7},
        "memorySafety": {"mode": "reckless"},
        "concurrency": {"continuousBatching": False},
    }
    status, answer = served.call("PUT", body=body)
    issues = {one["field"]: one["severity"] for one in answer["error"]["issues"]}
    assert status == 400
    assert issues == {
        "generation.topK": "error",
        "generation.minP": "error",
        "memorySafety.mode": "warning",
        "concurrency.continuousBatching": "warning",
    }


def test_an_override_lives_for_a_while_and_never_in_the_file(served: Served) -> None:
    body = {"settings": {"generation": {"topK": 6}}, "ttl_seconds": 600}
    status, answer = served.call("POST", "runtime-overrides", body)
    assert status == 200
    assert served.ask().params.top_k == 6
    assert served.call("GET")[1]["override_active"] is True
    assert served.call("POST", "runtime-overrides", body)[0] == 409
    assert served.call("DELETE", "runtime-overrides/nonsense")[0] == 404
    assert served.call("DELETE", f"runtime-overrides/{answer['token']}")[0] == 200
    assert served.ask().params.top_k == 0
    assert not served.path.exists()


def test_an_override_ends_by_itself(served: Served) -> None:
    body = {"settings": {"generation": {"topK": 6}}, "ttl_seconds": 0.05}
    assert served.call("POST", "runtime-overrides", body)[0] == 200
    deadline = time.monotonic() + 10
    while served.call("GET")[1]["override_active"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert served.ask().params.top_k == 0


@pytest.mark.parametrize(
    "body",
    [
        {"settings": {"generation": {"topK": "x"}}},
        {"settings": {"network": {"port": 9}}},
        {"settings": {}, "ttl_seconds": 0},
        {"settings": {}, "ttl_seconds": 3601},
        {},
    ],
)
def test_a_wrong_override_is_refused_and_another_may_follow(body: Any, served: Served) -> None:
    assert served.call("POST", "runtime-overrides", body)[0] == 400
    assert served.call("GET")[1]["override_active"] is False
    assert served.call("POST", "runtime-overrides", {"settings": {}})[0] == 200


@pytest.mark.slow
def test_a_real_load_tells_its_plan_and_a_later_manifest_is_a_400(tmp_path: Path) -> None:
    folder = tmp_path / "models/org/tiny"
    backend = byte_level_tokenizer()
    save_tiny(folder, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    store = SettingsStore(tmp_path / "s.json", environment={}, legacy={})
    store.override_in_memory({"cache": {"blockDisk": {"enabled": False}}})
    source = BundleSource(allow_paths=True)
    live = LiveSettings(store, source)
    with running_server(source, ServerConfig(port=0, drain_s=0.2, live=live)) as url:

        def ask() -> httpx2.Response:
            body = {"model": str(folder), "messages": HI, "max_tokens": 2}
            return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)

        assert ask().status_code == 200
        safety = httpx2.get(f"{url}/admin/cache-stats").json()["memory_safety"]
        assert (safety["mode"], safety["slider"]) == ("safe_auto", 2)
        decision = safety["last_load_decision"]
        assert decision["allowed"]
        assert decision["working_set"]["weights_bytes"] > 0
        assert safety["resolved_load_budget_bytes"] < safety["resolved_physical_memory_bytes"]
        (folder / "osaurus.json").write_text('{"model_version": "1"}')
        answer = ask()
        assert answer.status_code == 400
        assert "required_osaurus_version" in answer.json()["error"]["message"]
        (folder / "osaurus.json").unlink()
        assert ask().status_code == 200


def test_strangers_see_and_change_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "is_loopback", lambda host: False)
    for method, path in (
        ("GET", "runtime-settings"),
        ("PUT", "runtime-settings"),
        ("PATCH", "runtime-settings"),
        ("POST", "runtime-overrides"),
        ("DELETE", "runtime-overrides/x"),
    ):
        assert served.call(method, path, {"settings": {}})[0] == 401


def test_a_key_and_whom_to_trust_count_from_the_next_request_on(served: Served) -> None:
    assert served.call("GET")[0] == 200
    served.write(network={"apiKey": "sesame", "trustLoopback": False})
    assert served.call("GET")[0] == 401
    assert served.call("GET", headers={"authorization": "Bearer sesame"})[0] == 200
    assert "sesame" not in served.path.read_text()
    served.write(network={"apiKey": "other", "trustLoopback": False})
    assert served.call("GET", headers={"authorization": "Bearer sesame"})[0] == 401
    served.write(network={"trustLoopback": True})
    assert served.call("GET")[0] == 200


def test_a_server_without_a_file_says_so(running: Running) -> None:
    response = httpx2.get(f"{running.url}/admin/runtime-settings")
    assert response.status_code == 400
    assert "without a settings file" in response.json()["error"]["message"]


def test_the_served_name_is_a_further_name_of_the_model_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models/org/thing"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(tmp_path / "models"))
    path = tmp_path / "server-runtime.json"
    path.write_text('{"network": {"servedModelName": "house-model"}}')
    source = BundleSource()
    LiveSettings(SettingsStore(path, environment={}, legacy={}), source, default_model="org/thing")
    assert source.find("House-Model").model_id == "org/thing"
    with pytest.raises(ModelNotFound):
        source.find("other-model")


def test_a_programs_own_model_names_are_those_that_the_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("big", "small", "claude-here"):
        folder = tmp_path / "models/org" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(tmp_path / "models"))
    path = tmp_path / "server-runtime.json"
    aliases = ["claude-*=org/big", "claude-haiku-*=org/small", "gpt-5 = small"]
    path.write_text(json.dumps({"models": {"aliases": aliases}}))
    source = BundleSource()
    store = SettingsStore(path, environment={}, legacy={})
    LiveSettings(store, source)
    names = ("Claude-Opus-9", "claude-haiku-9", "gpt-5", "claude-here")
    found = [source.find(name, allow_paths=False).model_id for name in names]
    assert found == ["org/big", "org/small", "org/small", "org/claude-here"]
    with pytest.raises(ModelNotFound):
        source.find("gpt-5-mini", allow_paths=False)


@pytest.mark.parametrize("alias", ["claude", "=m", "a=", "a*b=m", "a=m*"])
def test_an_alias_that_cannot_be_meant_is_refused(alias: str) -> None:
    with pytest.raises(InvalidField, match="NAME=MODEL"):
        BY_KEY["models.aliases"].check([alias])
