"""Starting and stopping: ready when it says so, streams ended in order, errors before the start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from api.scripted_engine import Hold, Say, ScriptedEngine, ScriptedSource
from osaurus.errors import InvalidField, UnsupportedBundle
from osaurus.server.serve import ServerConfig, running_server

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def test_stopping_ends_running_streams_with_an_error_frame_and_stops_the_engine() -> None:
    engine = ScriptedEngine(lambda request, index: [Say("x"), Hold("never")])
    source = ScriptedSource({"m": engine})
    with ThreadPoolExecutor() as threads:
        with running_server(source, ServerConfig(port=0, drain_s=0.05)) as url:
            answer = threads.submit(
                lambda: httpx2.post(f"{url}/v1/chat/completions", json=BODY, timeout=30).text
            )
            engine.wait_until_held("never")
        *_, failure, done, _ = answer.result().split("\n\n")
    assert "engine_shutdown" in failure
    assert done == "data: [DONE]"
    assert engine.capacity_snapshot().is_shutdown


def test_streams_that_end_within_the_drain_end_well() -> None:
    engine = ScriptedEngine(lambda request, index: [Say("x"), Hold("soon"), Say("y")])
    with ThreadPoolExecutor() as threads:
        with running_server(ScriptedSource({"m": engine}), ServerConfig(port=0)) as url:
            answer = threads.submit(
                lambda: httpx2.post(f"{url}/v1/chat/completions", json=BODY, timeout=30).text
            )
            engine.wait_until_held("soon")
            threading.Timer(0.2, engine.open_gate, ("soon",)).start()
        assert '"finish_reason":"stop"' in answer.result()


def test_servers_can_be_started_again_and_leave_no_thread() -> None:
    before = threading.active_count()
    for _ in range(2):
        with running_server(ScriptedSource({"m": ScriptedEngine()}), ServerConfig(port=0)) as url:
            assert httpx2.get(f"{url}/health").status_code == 200
    assert threading.active_count() <= before


def test_a_port_in_use_is_said_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=taken.getsockname()[1])
        with (
            pytest.raises(InvalidField, match=r"port: .*in use"),
            running_server(ScriptedSource({}), config),
        ):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_others_can_reach_needs_to_be_meant(host: str) -> None:
    with (
        pytest.raises(InvalidField, match="host: "),
        running_server(ScriptedSource({}), ServerConfig(host=host, port=0)),
    ):
        pass


def test_a_preloaded_model_is_there_and_one_that_fails_stops_nothing() -> None:
    source = ScriptedSource({"m": ScriptedEngine(), "bad": ScriptedEngine()})
    source.failures["bad"] = UnsupportedBundle("unknown architecture")
    loaded = threading.Event()
    for name in ("m", "bad"):
        config = ServerConfig(port=0, preload=name, drain_s=0)
        with running_server(source, config) as url:
            for _ in range(500):
                health = httpx2.get(f"{url}/health").json()
                if health["loaded"] or health["load_errors"]:
                    break
                loaded.wait(0.01)
            assert health["loaded"] == (["m"] if name == "m" else [])
            assert bool(health["load_errors"]) == (name == "bad")


_PROGRAM = """
import sys
from api.scripted_engine import ScriptedEngine, ScriptedSource
from osaurus.server.serve import ServerConfig, run_server
run_server(ScriptedSource({"m": ScriptedEngine()}), ServerConfig(port=0, drain_s=0.1))
assert sys.getswitchinterval() < 0.001
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_a_process_prints_one_ready_line_and_ends_by_itself_when_told(
    stop_signal: signal.Signals,
) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests'}"}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("osaurus is ready on http://127.0.0.1:")
        assert httpx2.get(line.split()[-1] + "/health").status_code == 200
        process.send_signal(stop_signal)
        rest, complaints = process.communicate(timeout=20)
    assert rest == ""
    assert complaints == ""
    assert process.returncode == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_on_a_kept_connection_does_not_wait_for_acknowledgements(stream: bool) -> None:
    source = ScriptedSource({"m": ScriptedEngine()})
    took_s: list[float] = []
    with (
        running_server(source, ServerConfig(port=0, drain_s=0.2)) as url,
        httpx2.Client(base_url=url) as client,
    ):
        for _ in range(10):
            began_s = time.monotonic()
            client.post("/v1/chat/completions", json={**BODY, "stream": stream})
            took_s.append(time.monotonic() - began_s)
    # A second small segment that waits for the first to be acknowledged takes 40 ms each time.
    assert min(took_s[1:]) < 0.03
