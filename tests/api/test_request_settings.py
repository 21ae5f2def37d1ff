"""Settings that bound or shape single requests and decide what a request may load: each is
written to the file of a server that runs, and the next request has it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.conftest import Running, Start
from api.scripted_engine import Hold, Say, Script, ScriptedEngine, ScriptedSource
from osaurus.runtime.live import LiveSettings
from osaurus.server.serve import ServerConfig
from osaurus.settings.store import SettingsStore
from osaurus.types.engine import GenerationRequest

HI = [{"role": "user", "content": "hi"}]


def _letters(request: GenerationRequest, index: int) -> Any:
    """Slowly enough for a reader to get each by itself."""
    for letter in "abcdefgh":
        yield Say(letter)
        time.sleep(0.01)


class Served:
    """A server with model "m" over a settings file."""

    def __init__(self, start: Start, path: Path, script: Script, **config: Any) -> None:
        self.path = path
        source = ScriptedSource(
            {"m": ScriptedEngine(script), "other": ScriptedEngine()},
            sizes={"m": 60, "other": 50},
            memory=200,
            make_engine=lambda name: ScriptedEngine(script),
        )
        source.last_plan = None  # type: ignore[attr-defined]
        store = SettingsStore(path, environment={}, legacy={})
        live = LiveSettings(store, source)  # type: ignore[arg-type]
        settings = {"port": 0, "drain_s": 0.2, "live": live, **config}
        self.running: Running = start(source=source, config=ServerConfig(**settings))
        self.source = source

    def write(self, **sections: Any) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(sections))
        temporary.replace(self.path)

    def ask(self, model: str = "m", **fields: Any) -> httpx2.Response:
        body = {"model": model, "messages": HI, **fields}
        return self.post("/v1/chat/completions", body)

    def post(self, path: str, body: Any = None) -> httpx2.Response:
        return httpx2.post(f"{self.running.url}{path}", json=body, timeout=30)

    def deltas(self) -> list[str]:
        lines = self.ask(stream=True).text.splitlines()
        frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for frame in frames for choice in frame["choices"]]
        return [text for one in choices if (text := one["delta"].get("content"))]

    def loaded(self) -> list[str]:
        return httpx2.get(f"{self.running.url}/health").json()["loaded"]


Serve = Callable[..., Served]


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Serve:
    return lambda script=_letters, **config: Served(
        start, tmp_path / "server-runtime.json", script, **config
    )


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_more_requests_in_a_minute_than_allowed_are_told_when_to_come_again(serve: Serve) -> None:
    served = serve()
    assert served.ask().status_code == 200
    served.write(network={"rateLimitRequestsPerMinute": 3})
    assert [served.ask().status_code for _ in range(3)] == [200, 200, 429]
    refused = served.ask(stream=True)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_exceeded", "rate_limit_exceeded")
    assert "network.rateLimitRequestsPerMinute allows 3" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert httpx2.get(f"{served.running.url}/v1/models").status_code == 200  # no answer began
    served.write(network={"rateLimitRequestsPerMinute": None})
    assert served.ask().status_code == 200


def test_an_answer_that_takes_too_long_ends_with_the_limit_in_words(serve: Serve) -> None:
    served = serve(lambda request, index: [Say("ab"), Hold("never")])
    served.write(network={"timeoutSeconds": 0.2})
    late = served.ask()
    assert late.status_code == 504
    assert "the 0.2 s that network.timeoutSeconds allows" in late.json()["error"]["message"]
    streamed = served.ask(stream=True)
    assert streamed.status_code == 200
    assert '"content":"a' in streamed.text
    assert "network.timeoutSeconds" in streamed.text
    health = httpx2.get(f"{served.running.url}/health").json()
    assert (health["inflight"], health["http_inflight"]) == ({}, 0)


def test_the_time_for_an_answer_counts_its_models_load(serve: Serve) -> None:
    import threading

    served = serve()
    served.source.gates["m"] = threading.Event()
    served.write(network={"timeoutSeconds": 0.2})
    try:
        assert served.ask().status_code == 504
    finally:
        served.source.gates["m"].set()


def test_a_stream_sends_as_many_pieces_at_once_as_the_setting_says(serve: Serve) -> None:
    served = serve()
    for interval, at_least, at_most in ((1, 6, 8), (4, 2, 3), (100, 2, 2)):
        served.write(generation={"streamInterval": interval})
        deltas = served.deltas()
        assert "".join(deltas) == "abcdefgh"
        assert at_least <= len(deltas) <= at_most
    assert served.ask().json()["choices"][0]["message"]["content"] == "abcdefgh"


def test_models_load_by_hand_only_where_the_settings_say_so(serve: Serve) -> None:
    served = serve()
    served.write(power={"jitLoad": False})
    refused = served.ask()
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_loaded", "model")
    assert "power.jitLoad" in error["message"]
    assert served.loaded() == []
    assert served.post("/admin/preload", {"model": "m"}).status_code == 200
    assert served.ask().status_code == 200
    assert served.ask("other").status_code == 404
    served.post("/admin/unload", {"model": "m"})
    assert served.ask().status_code == 404
    served.write(power={"jitLoad": True})
    assert served.ask().status_code == 200


def test_a_model_that_serve_names_is_loaded_by_hand(serve: Serve) -> None:
    served = serve(preload="m")
    served.write(power={"jitLoad": False})
    _until(lambda: served.loaded() == ["m"])
    assert served.ask().status_code == 200


def test_a_model_loaded_by_hand_is_loaded_anew_by_requests_after_a_change(serve: Serve) -> None:
    served = serve()
    served.post("/admin/preload", {"model": "m"})
    served.write(power={"jitLoad": False}, performance={"latencyBudgetMs": 9})
    _until(lambda: served.ask().status_code == 200)
    assert served.source.loads == ["m", "m"]


def test_an_idle_model_wakes_for_a_request_unless_the_settings_forbid_it(serve: Serve) -> None:
    served = serve()
    served.write(residency={"mode": "immediately"})
    for count in (1, 2):
        assert served.ask().status_code == 200
        _until(lambda count=count: served.source.freed == ["m"] * count)
    served.write(residency={"mode": "immediately"}, power={"wakeOnRequest": False})
    refused = served.ask()
    assert refused.status_code == 404
    assert "power.wakeOnRequest" in refused.json()["error"]["message"]
    assert served.post("/admin/preload", {"model": "m"}).status_code == 200


def test_deep_sleep_unloads_sooner_than_residency_and_never_later(serve: Serve) -> None:
    served = serve()

    def remaining(**power: Any) -> int | None:
        served.write(power=power, residency={"mode": "after_seconds", "seconds": 300})
        served.ask()
        _until(lambda: httpx2.get(f"{served.running.url}/health").json()["inflight"] == {})
        (row,) = httpx2.get(f"{served.running.url}/health").json()["resident_models"]
        return row["idle_seconds_remaining"]

    assert (remaining() or 0) > 290
    assert 40 < (remaining(autoSleepEnabled=True, deepSleepAfterSeconds=50) or 0) <= 50
    assert (remaining(autoSleepEnabled=True, deepSleepAfterSeconds=5000) or 0) > 290
    assert (remaining(autoSleepEnabled=False, deepSleepAfterSeconds=50) or 0) > 290


def test_models_make_room_as_the_policy_and_its_threshold_say(serve: Serve) -> None:
    served = serve()

    def stay(**residency: Any) -> list[str]:
        served.write(residency=residency)
        served.post("/admin/unload")
        assert [served.ask(name).status_code for name in ("m", "other")] == [200, 200]
        return served.loaded()

    several = "manual_multi_model"
    assert stay() == stay(evictionPolicy="strict_single_model") == ["other"]
    assert stay(evictionPolicy=several) == ["m", "other"]
    # 110 of 200 bytes: within four fifths, not within half; the hard threshold is one too.
    assert stay(evictionPolicy=several, loadRAMSoftThreshold=0.5) == ["other"]
    assert stay(evictionPolicy=several, loadRAMHardThreshold=0.5) == ["other"]


def test_an_idle_model_stays_as_long_as_the_setting_says(serve: Serve) -> None:
    served = serve()

    def remaining(**residency: Any) -> int | None:
        served.write(residency=residency)
        served.ask()
        _until(lambda: httpx2.get(f"{served.running.url}/health").json()["inflight"] == {})
        (row,) = httpx2.get(f"{served.running.url}/health").json()["resident_models"]
        return row["idle_seconds_remaining"]

    assert 890 < (remaining() or 0) <= 900
    assert 50 < (remaining(seconds=60) or 0) <= 60
    assert remaining(mode="never", seconds=60) is None
    served.write(residency={"mode": "immediately"})
    served.ask()
    _until(lambda: served.loaded() == [])


def test_an_answer_that_repeats_itself_is_flagged_as_soon_as_the_setting_says_so(
    serve: Serve,
) -> None:
    served = serve(lambda request, index: [Say("so it goes on " * 14)])

    def remarks() -> dict[str, Any]:
        return served.ask().json()["choices"][0].get("osaurus", {})

    assert remarks() == {}
    served.write(guardrails={"degenerationDetection": True})
    assert remarks() == {"degeneration": "repeated_phrase"}
