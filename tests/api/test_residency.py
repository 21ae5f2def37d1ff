"""Models that come and go, as clients see it: health, unloading by hand and by time, one model
after another, engines that die, a drain."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from api.conftest import Running, Start
from api.scripted_engine import Hold, Say, ScriptedEngine, ScriptedSource, Step
from osaurus.server.serve import ServerConfig
from osaurus.types.engine import GenerationRequest
from osaurus.types.runtime import ResidencyPolicy, RuntimeSettings

HI: list[Any] = [{"role": "user", "content": "hi"}]


def _config(**settings: Any) -> ServerConfig:
    return ServerConfig(port=0, drain_s=0.2, runtime=RuntimeSettings(**settings))


def _health(running: Running) -> dict[str, Any]:
    return httpx2.get(f"{running.url}/health").json()


def _until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        pause.wait(0.005)


def _ask(running: Running, model: str = "m", **fields: Any) -> str:
    answer = running.client().chat.completions.create(model=model, messages=HI, **fields)
    return answer.choices[0].message.content or ""


def _held(request: GenerationRequest, index: int) -> Sequence[Step]:
    return [Say("x"), Hold("go"), Say("y")]


def _two(start: Start, **settings: Any) -> Running:
    source = ScriptedSource(
        {"a": ScriptedEngine(_held), "b": ScriptedEngine()},
        sizes={"a": 60, "b": 50},
        memory=100,
    )
    return start(source=source, config=_config(**settings))


def test_health_says_when_an_idle_model_will_go(start: Start) -> None:
    running = start(config=_config(residency=ResidencyPolicy(seconds=300)))
    _ask(running)
    _until(lambda: _health(running)["inflight"] == {})
    (row,) = _health(running)["resident_models"]
    assert 290 < row["idle_seconds_remaining"] <= 300
    at = datetime.fromisoformat(row["idle_unload_at"])
    assert timedelta(seconds=290) < at - datetime.now(UTC) <= timedelta(seconds=301)
    assert row["idle_unload_at"].endswith("Z")
    assert row["last_use_source"] == "http_api"


def test_health_has_no_time_for_a_model_in_use_or_kept_for_ever(start: Start) -> None:
    running = start(_held, config=_config(residency=ResidencyPolicy(mode="never")))
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(_ask, running)
        running.engine.wait_until_held("go")
        health = _health(running)
        (row,) = health["resident_models"]
        assert (row["inflight"], row["idle_unload_at"], row["idle_seconds_remaining"]) == (
            1,
            None,
            None,
        )
        assert (health["inflight"], health["chat_active"]) == ({"m": 1}, 1)
        running.engine.open_gate("go")
        assert answer.result() == "xy"
    _until(lambda: _health(running)["inflight"] == {})
    (row,) = _health(running)["resident_models"]
    assert (row["idle_unload_at"], row["idle_seconds_remaining"]) == (None, None)


def test_an_idle_model_goes_by_itself_and_comes_back_when_asked_for(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()}, make_engine=lambda _: ScriptedEngine())
    running = start(source=source, config=_config(residency=ResidencyPolicy(mode="immediately")))
    for count in (1, 2):
        assert _ask(running) == "Hello!"
        _until(lambda count=count: source.freed == ["m"] * count)
        assert _health(running)["loaded"] == []


def test_another_model_waits_for_the_stream_that_runs(start: Start) -> None:
    running = _two(start)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(_ask, running, "a")
        running.source.engines["a"].wait_until_held("go")
        second = threads.submit(_ask, running, "b")
        _until(lambda: _health(running)["loading"] == ["b"])
        assert _health(running)["inflight_load_bytes"] == 50
        assert not second.done()
        running.source.engines["a"].open_gate("go")
        assert first.result() == "xy"
        assert second.result() == "Hello!"
    health = _health(running)
    assert (health["loaded"], health["current_model"]) == (["b"], "b")
    assert running.source.freed == ["a"]
    assert health["inflight_load_bytes"] == 0


def test_several_models_stay_where_the_settings_allow(start: Start) -> None:
    running = _two(start, eviction="manual_multi_model", ram_soft_threshold=1.0)
    running.source.engines["a"].open_gate("go")
    running.source.memory = 200
    assert (_ask(running, "a"), _ask(running, "b")) == ("xy", "Hello!")
    assert _health(running)["loaded"] == ["a", "b"]
    names = [row["name"] for row in _health(running)["resident_models"]]
    assert names == ["b", "a"]  # the current one first


def test_models_are_loaded_and_unloaded_by_hand(start: Start) -> None:
    source = ScriptedSource(
        {"a": ScriptedEngine(), "b": ScriptedEngine()}, make_engine=lambda _: ScriptedEngine()
    )
    running = start(source=source)
    for name in ("a", "b"):
        answer = httpx2.post(f"{running.url}/admin/preload", json={"model": name}).json()
        assert answer == {"status": "ok", "loaded": name}
    assert _health(running)["loaded"] == ["a", "b"]
    for expected in (["a"], []):
        answer = httpx2.post(f"{running.url}/admin/unload", json={"model": "a"}).json()
        assert answer["unloaded"] == expected
    assert httpx2.post(f"{running.url}/admin/unload").json()["unloaded"] == ["b"]
    assert source.freed == ["a", "b"]
    assert httpx2.post(f"{running.url}/admin/unload", json={"model": "x"}).status_code == 404
    assert httpx2.post(f"{running.url}/admin/preload", json={"model": "x"}).status_code == 404
    headers = {"x-forwarded-for": "192.0.2.1"}
    for path in ("unload", "preload"):
        refused = httpx2.post(f"{running.url}/admin/{path}", json={"model": "a"}, headers=headers)
        assert refused.status_code == 401


def test_unloading_by_hand_lets_the_stream_that_runs_end(start: Start) -> None:
    running = start(_held)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(_ask, running)
        running.engine.wait_until_held("go")
        unload = threads.submit(httpx2.post, f"{running.url}/admin/unload", timeout=30)
        _until(lambda: _health(running)["loaded"] == [])
        assert running.source.freed == []
        running.engine.open_gate("go")
        assert answer.result() == "xy"
        assert unload.result().json()["status"] == "ok"
    assert running.source.freed == ["m"]


def test_a_client_that_does_not_read_keeps_no_model_from_being_unloaded(start: Start) -> None:
    running = start(lambda request, index: [Say("x" * 200_000)], max_context_tokens=1_000_000)
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
    with socket.create_connection(("127.0.0.1", running.port)) as silent:
        silent.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        _until(lambda: len(running.engine.requests) == 1)
        running.engine.wait_until_idle()
        answer = httpx2.post(f"{running.url}/admin/unload", timeout=20)
        assert answer.json() == {"status": "ok", "unloaded": ["m"]}
        assert running.source.freed == ["m"]


def test_an_engine_that_dies_takes_its_streams_along_and_nothing_else(start: Start) -> None:
    made: list[ScriptedEngine] = []

    def make(_: str) -> ScriptedEngine:
        made.append(ScriptedEngine(_held))
        return made[-1]

    running = start(source=ScriptedSource({"m": ScriptedEngine()}, make_engine=make))
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(_ask, running)
        _until(lambda: bool(made))
        made[0].wait_until_held("go")
        made[0].fail("the engine failed: CUDA error: unspecified launch failure")
        with pytest.raises(openai.APIStatusError) as caught:
            answer.result()
        assert caught.value.status_code == 503
        again = threads.submit(_ask, running)
        _until(lambda: len(made) == 2)
        made[1].open_gate("go")
        assert again.result() == "xy"
    health = _health(running)
    assert running.source.loads == ["m"]
    assert "unspecified launch failure" in health["engine_last_error"]
    assert health["engines_failed"] == 1


def test_readiness_follows_the_preload(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()})
    source.gates["m"] = threading.Event()
    running = start(source=source, config=ServerConfig(port=0, preload="m", drain_s=0))
    answer = httpx2.get(f"{running.url}/health/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "reason": "loading"})
    assert _health(running)["ready"] is False
    source.gates["m"].set()
    _until(lambda: httpx2.get(f"{running.url}/health/ready").status_code == 200)
    assert httpx2.get(f"{running.url}/health/ready").json() == {"ready": True, "reason": None}


def test_an_answer_that_repeats_itself_is_flagged_when_asked_for(start: Start) -> None:
    def stuck(request: GenerationRequest, index: int) -> Sequence[Step]:
        return [Say("so it goes on " * 14)]

    for wanted in (False, True):
        running = start(stuck, config=_config(degeneration_detection=wanted))
        answer = running.client().chat.completions.create(model="m", messages=HI)
        remarks = answer.choices[0].model_extra or {}
        expected = {"degeneration": "repeated_phrase"} if wanted else {}
        assert remarks.get("osaurus", {}) == expected
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.choices[0].message.content or "").count("so it goes on") == 14


_PROGRAM = """
from api.scripted_engine import Hold, Say, ScriptedEngine, ScriptedSource
from osaurus.server.serve import ServerConfig, run_server
import sys, threading
engine = ScriptedEngine(lambda request, index: [Say("x"), Hold("go"), Say("y")])
def end_soon():
    engine.wait_until_held("go")
    print("held", flush=True)
    sys.stdin.readline()
    engine.open_gate("go")
threading.Thread(target=end_soon, daemon=True).start()
run_server(ScriptedSource({"m": engine}), ServerConfig(port=0, drain_s=20))
"""


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")
def test_a_process_told_to_stop_lets_its_streams_end_and_tells_its_supervisor(
    tmp_path: Path,
) -> None:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / name) for name in ("src", "tests"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(20)
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
        }
        with (
            ThreadPoolExecutor() as threads,
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            assert process.stdin is not None
            url = process.stdout.readline().split()[-1]
            assert supervisor.recv(100) == b"READY=1"
            body = {"model": "m", "messages": HI, "stream": True}
            answer = threads.submit(
                lambda: httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=30).text
            )
            assert process.stdout.readline() == "held\n"
            process.send_signal(signal.SIGTERM)
            assert supervisor.recv(100) == b"STOPPING=1"
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"{url}/health")
            process.stdin.write("\n")
            process.stdin.flush()
            assert '"finish_reason":"stop"' in answer.result()
            assert process.wait(20) == 0
