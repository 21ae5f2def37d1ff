"""Ollama's `keep_alive`, asked for over the whole application on a clock that stands still."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from api.scripted_engine import ScriptedEngine, ScriptedSource
from osaurus.chat.service import ChatEngine
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.app import App, AppConfig, build_app
from osaurus.types.runtime import ResidencyPolicy, RuntimeSettings
from unit.runtime.virtual import Blocking, VirtualLoop


class House:
    def __init__(self, **settings: Any) -> None:
        self.loop = VirtualLoop()
        run = Blocking()
        run.is_immediate = True
        self.source = ScriptedSource(
            {name: ScriptedEngine() for name in "ab"}, make_engine=lambda _: ScriptedEngine()
        )
        self.runtime = ModelRuntime(
            self.source,
            RuntimeSettings(eviction="manual_multi_model", **settings),
            clock=self.loop.time,
            run=run,
        )
        self.app: App = build_app(ChatEngine(self.runtime), AppConfig())

    def ask(self, path: str, client: str = "127.0.0.1", **body: Any) -> tuple[int, dict[str, Any]]:
        sent: list[Any] = []
        body = {"model": "a", **body}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            return await self.loop.create_future()  # the client stays

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"host", b"localhost")],
            "client": (client, 1),
        }
        task = self.loop.create_task(self.app(scope, receive, send))
        self.loop.settle()
        assert task.done()
        task.result()
        text = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(text)

    @property
    def resident(self) -> list[str]:
        return sorted(row.model.model_id for row in self.runtime.resident())


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.runtime.check()
    house.loop.run_until_complete(house.runtime.shut_down())
    assert not house.loop.errors
    house.loop.close()


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [("5m", 300), (90, 90), ("90", 90), ("1h30m", 5400), (0.5, 0.5), ("1500ms", 1.5)],
)
def test_a_model_stays_as_long_as_the_request_says(
    house: House, keep_alive: Any, seconds: float
) -> None:
    status, answer = house.ask("/api/chat", keep_alive=keep_alive)
    assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")
    house.loop.advance(seconds - 0.1)
    assert house.resident == ["a"]
    house.loop.advance(0.1)
    assert house.resident == []
    assert house.source.freed == ["a"]


@pytest.mark.parametrize("keep_alive", [-1, "-1", "-1m", -0.5, 1e300])
def test_below_zero_is_for_ever(house: House, keep_alive: Any) -> None:
    house.ask("/api/generate", keep_alive=keep_alive)
    house.loop.advance(10 * 365 * 86_400)
    assert house.resident == ["a"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("keep_alive", [0, "0", "0s"])
def test_zero_without_messages_unloads(house: House, path: str, keep_alive: Any) -> None:
    house.ask(path)
    assert house.resident == ["a"]
    status, answer = house.ask(path, keep_alive=keep_alive)
    assert (status, answer["done_reason"]) == (200, "unload")
    house.loop.advance(0)
    assert house.resident == []
    assert house.ask(path, keep_alive=keep_alive)[1]["done_reason"] == "unload"
    assert house.source.loads == ["a"]


def test_a_later_request_without_it_leaves_the_time_as_it_was_and_counts_anew(
    house: House,
) -> None:
    house.ask("/api/chat", keep_alive="10m")
    house.loop.advance(500)
    house.ask("/api/chat")
    house.loop.advance(599)
    assert house.resident == ["a"]
    house.loop.advance(1)
    assert house.resident == []


def test_it_holds_for_its_model_alone_and_until_that_is_unloaded(house: House) -> None:
    house.ask("/api/chat", keep_alive=60)
    house.ask("/api/chat", model="b")
    house.loop.advance(60)
    assert house.resident == ["b"]
    house.ask("/api/chat")
    house.loop.advance(ResidencyPolicy().seconds - 1)
    assert house.resident == ["a"]


@pytest.mark.parametrize("keep_alive", [True, "soon", [], "5 minutes", "m", "1e3", {}, "٥m"])
def test_what_is_no_time_is_refused_by_name(house: House, keep_alive: Any) -> None:
    status, answer = house.ask("/api/chat", keep_alive=keep_alive)
    assert status == 400
    assert answer["error"].startswith("keep_alive: must be seconds or a duration")
    assert house.source.loads == []


def test_unloading_by_it_is_for_the_owner_of_the_machine() -> None:
    house = House()
    house.ask("/api/chat")
    status, answer = house.ask("/api/chat", client="10.0.0.9", keep_alive=0)
    assert status == 401
    assert isinstance(answer["error"], str)
    assert house.resident == ["a"]
    house.loop.run_until_complete(house.runtime.shut_down())
    house.loop.close()
