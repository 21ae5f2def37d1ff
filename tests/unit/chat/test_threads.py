"""One model's slow work keeps no other model waiting, and is bounded whoever goes away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from api.scripted_engine import CHATML, ScriptedEngine, ScriptedSource
from osaurus.bundle.template import ChatTemplate
from osaurus.chat.service import ChatEngine
from osaurus.chat.threads import ModelThreads
from osaurus.runtime.model import Listing, ModelContainer
from osaurus.runtime.pool import ModelRuntime
from osaurus.types.chat import ChatRequest, Message
from osaurus.types.runtime import RuntimeSettings


class _Gate:
    """Work that says when it has begun, and ends when it is let."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num_running = 0
        self.most_running = 0
        self._is_open = False

    def __call__(self) -> str:
        with self._changed:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open, 10)
            self.num_running -= 1
            self._changed.notify_all()
        return "done"

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def wait_until(self, num_running: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_running == num_running, 10)


def _run(scenario: Callable[[ModelThreads], Awaitable[None]]) -> None:
    async def bounded() -> None:
        threads = ModelThreads(2, name="test")
        async with asyncio.timeout(20):
            await scenario(threads)
        threads.close()

    asyncio.run(bounded())


def test_a_busy_model_runs_two_jobs_and_others_run_at_once() -> None:
    async def scenario(threads: ModelThreads) -> None:
        gate = _Gate()
        busy = [asyncio.create_task(threads.run("busy", gate)) for _ in range(8)]
        await asyncio.to_thread(gate.wait_until, 2)
        for _ in range(3):
            assert await threads.run("quiet", lambda: 5) == 5
        gate.open()
        assert await asyncio.gather(*busy) == ["done"] * 8
        assert gate.most_running == 2

    _run(scenario)


def test_jobs_whose_callers_went_away_count_until_they_end() -> None:
    async def scenario(threads: ModelThreads) -> None:
        gate = _Gate()
        left = [asyncio.create_task(threads.run("busy", gate)) for _ in range(4)]
        await asyncio.to_thread(gate.wait_until, 2)
        for task in left:
            task.cancel()
        assert await asyncio.gather(*left, return_exceptions=True)
        late = asyncio.create_task(threads.run("busy", gate))
        assert await threads.run("quiet", lambda: 5) == 5
        assert (gate.num_running, late.done()) == (2, False)
        gate.open()
        assert await late == "done"
        assert gate.most_running == 2

    _run(scenario)


def test_a_model_without_jobs_keeps_no_threads() -> None:
    async def scenario(threads: ModelThreads) -> None:
        for i in range(5):
            await threads.run(f"model {i}", lambda: None)
        with pytest.raises(ZeroDivisionError):
            await threads.run("m", lambda: 1 / 0)
        while threads.num_models:  # a job's caller may be told before the table is
            await asyncio.sleep(0)

    _run(scenario)


def test_after_closing_nothing_starts() -> None:
    async def scenario(threads: ModelThreads) -> None:
        gate = _Gate()
        tasks = [asyncio.create_task(threads.run("m", gate)) for _ in range(3)]
        await asyncio.to_thread(gate.wait_until, 2)
        threads.close()
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[:2] == ["done", "done"]
        assert isinstance(results[2], asyncio.CancelledError)
        with pytest.raises(RuntimeError, match="closed"):
            await threads.run("m", gate)

    _run(scenario)


class _Spinning(ChatTemplate):
    """Renders until it is let go."""

    def __init__(self, gate: _Gate) -> None:
        super().__init__(CHATML)
        self._gate = gate

    def check(self) -> None:
        self._gate()


def test_eight_renders_that_do_not_end_leave_another_model_its_answers() -> None:
    gate = _Gate()

    class Source(ScriptedSource):
        def load(self, listing: Listing) -> ModelContainer:
            container = super().load(listing)
            if listing.model_id == "good":
                return container
            return replace(
                container,
                face=lambda engine: replace(container.face(engine), template=_Spinning(gate)),
            )

    def request(model: str) -> ChatRequest:
        return ChatRequest(model=model, messages=(Message(role="user", content="hi"),))

    async def scenario() -> None:
        source = Source({"good": ScriptedEngine(), "bad": ScriptedEngine()})
        settings = RuntimeSettings(eviction="manual_multi_model")
        chat = ChatEngine(ModelRuntime(source, settings))
        hostile = [asyncio.create_task(chat.complete(request("bad"))) for _ in range(8)]
        await asyncio.to_thread(gate.wait_until, 2)
        for _ in range(3):
            completion = await chat.complete(request("good"))
            assert completion.choices[0].text == "Hello!"
        assert not any(task.done() for task in hostile)
        gate.open()
        await asyncio.gather(*hostile)
        assert gate.most_running == 2
        chat.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
