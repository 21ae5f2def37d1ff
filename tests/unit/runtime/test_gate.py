"""The device gate: one owner at a time, in the order in which they asked.

A state machine over tickets makes every order of asking, leaving and giving back; no thread is
needed for that. The tests with threads and tasks hold the ways of waiting.
"""

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from osaurus.runtime.gate import DeviceGate, Ticket, TicketState


class Queue(RuleBasedStateMachine):
    """A plain list is the model: its first ticket has the device."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = DeviceGate()
        self.line: list[Ticket] = []
        self.turns: list[int] = []  # in the order in which they were told
        self.admitted: list[int] = []
        self.count = 0

    @rule()
    def enter(self) -> None:
        number = self.count
        self.count += 1
        ticket = self.gate.enter(f"owner {number}", lambda: self.turns.append(number))
        self.line.append(ticket)
        if len(self.line) == 1:
            self.admitted.append(number)

    @rule(index=st.integers(0, 9), again=st.booleans())
    def leave(self, index: int, again: bool) -> None:
        if not self.line:
            return
        index %= len(self.line)
        ticket = self.line.pop(index)
        assert self.gate.leave(ticket) == (index == 0)
        if again:
            assert not self.gate.leave(ticket)
        if index == 0 and self.line:
            self.admitted.append(int(self.line[0].owner.split()[1]))

    @invariant()
    def holds(self) -> None:
        self.gate.check()
        assert self.turns == self.admitted
        assert self.gate.owner == (self.line[0].owner if self.line else None)
        assert self.gate.waiting == tuple(ticket.owner for ticket in self.line[1:])
        states = [ticket.state for ticket in self.line]
        assert states == [TicketState.ADMITTED, *[TicketState.WAITING] * len(states)][: len(states)]


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def _wait_until_queued(gate: DeviceGate, count: int) -> None:
    turn = threading.Event()
    for _ in range(1000):
        if len(gate.waiting) >= count:
            return
        turn.wait(0.005)
    pytest.fail(f"only {gate.waiting} are waiting")


def test_owners_pass_in_the_order_in_which_they_asked() -> None:
    gate = DeviceGate()
    order: list[str] = []

    def use(owner: str) -> None:
        with gate.hold(owner):
            assert gate.owner == owner
            order.append(owner)

    threads: list[threading.Thread] = []
    with gate.hold("first"):
        for number in range(5):
            thread = threading.Thread(target=use, args=(f"gen:{number}",))
            thread.start()
            threads.append(thread)
            _wait_until_queued(gate, number + 1)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [f"gen:{number}" for number in range(5)]
    assert gate.owner is None


def test_who_releases_and_asks_again_goes_behind_who_waits() -> None:
    gate = DeviceGate()
    order: list[str] = []

    def wait_once() -> None:
        with gate.hold("waiter"):
            order.append("waiter")

    with gate.hold("busy"):
        thread = threading.Thread(target=wait_once)
        thread.start()
        _wait_until_queued(gate, 1)
    with gate.hold("busy"):
        order.append("busy")
    thread.join()
    assert order == ["waiter", "busy"]


def test_the_device_is_free_again_after_an_owner_failed() -> None:
    gate = DeviceGate()
    with pytest.raises(ZeroDivisionError), gate.hold("load"):
        _ = 1 / 0
    with gate.hold("next"):
        assert gate.owner == "next"


def test_a_task_that_is_cancelled_in_the_queue_blocks_nobody() -> None:
    async def scenario() -> None:
        gate = DeviceGate()
        order: list[str] = []

        async def use(owner: str) -> None:
            async with gate.hold_async(owner):
                order.append(owner)

        async with gate.hold_async("load:m"):
            tasks = [asyncio.create_task(use(f"embedding {i}")) for i in range(3)]
            await asyncio.sleep(0)
            tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["embedding 0", "embedding 2"]
        assert gate.owner is None

    asyncio.run(scenario())


def test_a_task_that_is_cancelled_as_its_turn_comes_gives_the_device_back() -> None:
    async def scenario() -> None:
        gate = DeviceGate()

        async def use() -> None:
            async with gate.hold_async("embedding"):
                pytest.fail("it was cancelled before it knew of its turn")

        async with gate.hold_async("load:m"):
            task = asyncio.create_task(use())
            await asyncio.sleep(0)
        assert gate.owner == "embedding"  # its turn has come, and it has not run since
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert gate.owner is None
        with gate.hold("next"):
            pass

    asyncio.run(scenario())


def _on_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_seat_looks_after_what_cannot_wait_and_keeps_its_place() -> None:
    gate = DeviceGate()
    seat = gate.seat("gen:a")
    looked = threading.Event()
    got: list[bool] = []

    def meanwhile() -> bool:
        looked.set()
        return True

    def step() -> None:
        with seat.hold(meanwhile) as has_device:
            got.append(has_device)

    with gate.hold("load:b"):
        thread = _on_thread(step)
        _wait_until_queued(gate, 1)
        seat.nudge()
        assert looked.wait(10)
        assert gate.waiting == ("gen:a",)
    thread.join()
    assert got == [True]
    assert gate.owner is None


def test_a_seat_that_gives_up_leaves_the_queue() -> None:
    gate = DeviceGate()
    seat = gate.seat("gen:a")
    got: list[bool] = []

    def step() -> None:
        with seat.hold(lambda: False) as has_device:
            got.append(has_device)

    with gate.hold("load:b"):
        seat.nudge()  # before it waits: not lost
        _on_thread(step).join()
        assert gate.waiting == ()
        assert gate.owner == "load:b"
    assert got == [False]
    with seat.hold(lambda: False) as has_device:
        assert has_device


def test_no_engine_starves_another() -> None:
    gate = DeviceGate()
    order: list[str] = []
    ready = threading.Barrier(2)

    def steps(owner: str) -> None:
        seat = gate.seat(owner)
        ready.wait()
        for _ in range(200):
            with seat.hold(lambda: True):
                order.append(owner)

    for thread in [_on_thread(lambda name=name: steps(name)) for name in ("gen:a", "gen:b")]:
        thread.join()
    gate.check()
    # Whoever comes back queues behind whoever waits, so that both get their steps.
    assert order.count("gen:a") == order.count("gen:b") == 200
