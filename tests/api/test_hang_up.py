"""Clients that go away: their request ends within a step, others go on, nothing is left."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from api.conftest import Running, Start
from api.scripted_engine import Hold, Say, Step
from osaurus.types.engine import GenerationRequest

HI = [{"role": "user", "content": "hi"}]


def _open(running: Running, **fields: Any) -> socket.socket:
    """A raw connection that has sent a request."""
    body = json.dumps({"model": "m", "messages": HI, **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=10)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    return connection


def _health(running: Running) -> dict[str, Any]:
    return httpx2.get(f"{running.url}/health").json()


def _until(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        pause.wait(0.005)


def _is_idle(running: Running) -> bool:
    health = _health(running)
    return (
        health["inflight"] == {}
        and health["http_inflight"] == 0
        and all(row["num_requests_running"] == 0 for row in health["resident_models"])
    )


def _say_x_then_hold(request: GenerationRequest, index: int) -> Sequence[Step]:
    return [Say("x"), Hold("never"), Say("y")]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(start: Start, stream: bool) -> None:
    running = start(_say_x_then_hold)
    connection = _open(running, stream=stream)
    running.engine.wait_until_held("never")
    connection.close()
    running.engine.wait_until_idle()
    _until(lambda: _is_idle(running))


def test_a_client_that_resets_the_connection_cancels_its_request(start: Start) -> None:
    running = start(_say_x_then_hold)
    connection = _open(running, stream=True)
    running.engine.wait_until_held("never")
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    _until(lambda: _is_idle(running))


def test_all_choices_of_a_client_that_goes_away_are_cancelled(start: Start) -> None:
    running = start(_say_x_then_hold)
    connection = _open(running, stream=True, n=4)
    running.engine.wait_until_held("never", 4)
    connection.close()
    running.engine.wait_until_idle()
    _until(lambda: _is_idle(running))


def test_others_go_on_when_a_client_goes_away(start: Start) -> None:
    def script(request: GenerationRequest, index: int) -> Sequence[Step]:
        return [Say("x"), Hold("stays" if request.params.seed == 1 else "never"), Say("y")]

    running = start(script)
    with ThreadPoolExecutor() as threads:
        client = running.client().chat.completions
        other = threads.submit(lambda: client.create(model="m", messages=HI, seed=1))
        running.engine.wait_until_held("stays")
        leaver = _open(running, stream=True, seed=2)
        running.engine.wait_until_held("never")
        leaver.close()
        _until(lambda: _health(running)["inflight"] == {"m": 1})
        running.engine.open_gate("stays")
        assert other.result().choices[0].message.content == "xy"


def test_a_client_that_goes_away_while_its_model_loads_leaves_no_model(start: Start) -> None:
    running = start()
    running.source.gates["m"] = threading.Event()
    connection = _open(running, stream=True)
    _until(lambda: running.source.loads == ["m"])
    connection.close()
    _until(lambda: _health(running)["http_inflight"] == 0)
    running.source.gates["m"].set()
    _until(lambda: running.source.freed == ["m"])
    _until(lambda: _health(running)["loading"] == [])
    assert _health(running)["loaded"] == []
    assert _is_idle(running)
    assert running.engine.requests == []


def test_twenty_clients_that_go_away_leave_nothing_behind(start: Start) -> None:
    running = start(_say_x_then_hold)
    running.client().chat.completions.create(model="m", messages=HI, max_tokens=1)
    running.engine.wait_until_idle()
    threads_before = threading.active_count()
    for number in range(20):
        connection = _open(running, stream=number % 2 == 0)
        running.engine.wait_until_held("never")
        connection.close()
        running.engine.wait_until_idle()
    _until(lambda: _is_idle(running))
    _until(lambda: threading.active_count() <= threads_before)


def test_a_client_that_does_not_read_stops_nobody(start: Start) -> None:
    def script(request: GenerationRequest, index: int) -> Sequence[Step]:
        return [Say("x" * 200_000 if request.params.seed == 1 else "quick")]

    running = start(script, max_context_tokens=1_000_000)
    silent = _open(running, stream=True, seed=1)
    answer = running.client().chat.completions.create(model="m", messages=HI)
    assert answer.choices[0].message.content == "quick"
    silent.close()
    _until(lambda: _is_idle(running))
