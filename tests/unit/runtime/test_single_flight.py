"""One value a key: however many ask, whatever is taken down meanwhile.

A state machine drives values, removals, cancelled callers and the ends of creations and disposals
in every order; the tests after it are the sentences of the contract.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from osaurus.runtime.single_flight import SingleFlight
from unit.runtime.virtual import VirtualLoop

_KEYS = st.sampled_from(["a", "b"])


class Value:
    def __init__(self, key: str) -> None:
        self.key = key
        self.is_disposed = False


class Flights(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.flight = SingleFlight[Value]()
        self.gates: list[tuple[str, asyncio.Future[bool]]] = []  # of creations and disposals
        self.running: Counter[str] = Counter()
        self.callers: list[asyncio.Task[Value]] = []
        self.removers: list[asyncio.Task[Value | None]] = []
        self.removed: list[Value] = []

    async def _gate(self, key: str) -> bool:
        future: asyncio.Future[bool] = self.loop.create_future()
        self.gates.append((key, future))
        return await future

    async def _make(self, key: str) -> Value:
        self.running[key] += 1
        try:
            if not await self._gate(key):
                raise LookupError(key)
            return Value(key)
        finally:
            self.running[key] -= 1

    async def _dispose(self, value: Value) -> None:
        assert not value.is_disposed
        self.running[value.key] += 1
        await self._gate(value.key)
        self.running[value.key] -= 1
        value.is_disposed = True

    @rule(key=_KEYS)
    def ask(self, key: str) -> None:
        self.callers.append(self.loop.create_task(self._ask(key)))

    async def _ask(self, key: str) -> Value:
        value = await self.flight.value(key, lambda: self._make(key))
        assert self.flight.get(key) is value, "handed out while it is taken down"
        return value

    @rule(key=_KEYS)
    def remove(self, key: str) -> None:
        self.removers.append(self.loop.create_task(self.flight.remove(key, self._dispose)))

    @rule()
    def remove_all(self) -> None:
        self.loop.create_task(self.flight.remove_all(self._dispose))

    @rule(index=st.integers(0, 5))
    def cancel(self, index: int) -> None:
        tasks: list[asyncio.Task[Any]] = [*self.callers, *self.removers]
        if tasks:
            tasks[index % len(tasks)].cancel()

    @rule(index=st.integers(0, 5), works=st.booleans())
    def end(self, index: int, works: bool) -> None:
        if self.gates:
            _, future = self.gates.pop(index % len(self.gates))
            if not future.done():
                future.set_result(works)

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.turn()

    @invariant()
    def holds(self) -> None:
        self.flight.check()
        assert all(count <= 1 for count in self.running.values()), "two at once for one key"
        for task in [t for t in self.callers if t.done()]:
            self.callers.remove(task)
            if task.cancelled():
                continue
            if (error := task.exception()) is not None:
                assert isinstance(error, LookupError), error
                continue
            assert not task.result().is_disposed
        for task in [t for t in self.removers if t.done()]:
            self.removers.remove(task)
            if not task.cancelled() and (value := task.result()) is not None:
                assert value not in self.removed, "two removers got one value"
                self.removed.append(value)
                assert value.is_disposed

    def teardown(self) -> None:
        for _ in range(1000):
            if not (self.callers or self.removers or self.flight.creating()):
                break
            while self.gates:
                self.end(0, True)
            self.loop.settle()
            self.holds()
        assert [*self.callers, *self.removers] == []
        self.loop.settle()
        while self.gates:
            self.end(0, True)
            self.loop.settle()
        assert not self.loop.errors
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


TestFlights = Flights.TestCase
TestFlights.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_a_failure_is_seen_by_every_caller_and_nothing_is_kept() -> None:
    async def scenario() -> None:
        flight = SingleFlight[str]()
        go_on = asyncio.Event()

        async def fail() -> str:
            await go_on.wait()
            raise LookupError("no")

        async def work() -> str:
            return "made"

        async def unexpected(value: str) -> None:
            pytest.fail("there is nothing to dispose of")

        callers = [asyncio.create_task(flight.value("k", fail)) for _ in range(3)]
        await asyncio.sleep(0)
        remover = asyncio.create_task(flight.remove("k", unexpected))
        await asyncio.sleep(0)
        go_on.set()
        assert await remover is None
        for caller in callers:
            with pytest.raises(LookupError):
                await caller
        assert await flight.value("k", work) == "made"

    asyncio.run(scenario())


def test_a_disposal_that_fails_is_logged_and_the_key_is_free_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        flight = SingleFlight[int]()
        count = iter(range(9))

        async def make() -> int:
            return next(count)

        async def fail(value: int) -> None:
            raise RuntimeError("the device is gone")

        assert await flight.value("k", make) == 0
        assert await flight.remove("k", fail) == 0
        assert await flight.value("k", make) == 1

    asyncio.run(scenario())
    assert "the device is gone" in caplog.text


def test_only_the_expected_value_is_removed() -> None:
    async def scenario() -> None:
        flight = SingleFlight[list[int]]()

        async def make() -> list[int]:
            return [1]

        async def dispose(value: list[int]) -> None:
            value.clear()

        value = await flight.value("k", make)
        assert await flight.remove("k", dispose, expected=[1]) is None
        assert flight.get("k") is value
        assert await flight.remove("k", dispose, expected=value) is value
        assert flight.names() == []

    asyncio.run(scenario())


def test_who_was_given_a_claim_gets_the_value_that_is_going() -> None:
    async def scenario() -> None:
        claims: list[str] = []
        flight = SingleFlight[str](lambda key, value: claims.append(value))
        is_over = asyncio.Event()
        removal: asyncio.Task[str | None] | None = None

        async def make() -> str:
            return "first"

        async def dispose(value: str) -> None:
            await is_over.wait()

        caller = asyncio.create_task(flight.value("k", make, is_claimed=lambda: bool(claims)))
        while not claims:
            await asyncio.sleep(0)
            if flight.get("k"):
                removal = asyncio.create_task(flight.remove("k", dispose))
        assert await caller == "first"
        is_over.set()
        if removal is not None:
            assert await removal == "first"

    asyncio.run(scenario())
