"""One device, one user at a time, first come first served.

Held for one engine step, one embedding forward, one load or one unload, never for a whole
stream. Owners are names: `gen:MODEL`, `load:MODEL`, `unload:MODEL`, `embedding`. Thread-safe:
its callers are engine threads and loader threads; the event loop asks by `hold_async`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum


class TicketState(Enum):
    WAITING = "waiting"
    ADMITTED = "admitted"  #: whoever holds the ticket must give the device back
    LEFT = "left"  #: gave up before its turn, or has given the device back


class Ticket:
    """A place in the queue of one gate. `on_turn` is called once, under the gate's lock, when
    the place becomes the first; it must not block."""

    def __init__(self, owner: str, on_turn: Callable[[], object]) -> None:
        self.owner = owner
        self.state = TicketState.WAITING
        self.on_turn = on_turn


class DeviceGate:
    """A FIFO mutex. `threading.Lock` lets a thread that releases and asks again overtake
    those that wait; two engines sharing a device would then starve each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._holder: Ticket | None = None

    @property
    def owner(self) -> str | None:
        """Who holds the device now, for diagnostics."""
        holder = self._holder
        return None if holder is None else holder.owner

    @property
    def waiting(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(ticket.owner for ticket in self._waiting)

    def enter(self, owner: str, on_turn: Callable[[], object]) -> Ticket:
        """Queue up. The ticket may be admitted at once; every ticket must `leave`."""
        ticket = Ticket(owner, on_turn)
        with self._lock:
            self._waiting.append(ticket)
            self._admit_next()
        return ticket

    def leave(self, ticket: Ticket) -> bool:
        """Give the device back, or the place in the queue. True when the device had been
        given to the ticket. Idempotent."""
        with self._lock:
            state, ticket.state = ticket.state, TicketState.LEFT
            if state is TicketState.WAITING:
                self._waiting.remove(ticket)
            elif state is TicketState.ADMITTED:
                self._holder = None
                self._admit_next()
            return state is TicketState.ADMITTED

    @contextmanager
    def hold(self, owner: str) -> Generator[None]:
        """Wait for the device, hold it, hand it to the next in line. Not re-entrant."""
        turn = threading.Event()
        ticket = self.enter(owner, turn.set)
        try:
            turn.wait()
            yield
        finally:
            self.leave(ticket)

    @asynccontextmanager
    async def hold_async(self, owner: str) -> AsyncGenerator[None]:
        """The same for a task, which waits without a thread. A task that is cancelled while
        it waits was not admitted, or has given the device back."""
        loop = asyncio.get_running_loop()
        turn = asyncio.Event()
        ticket = self.enter(owner, lambda: loop.call_soon_threadsafe(turn.set))
        try:
            await turn.wait()
            yield
        finally:
            self.leave(ticket)

    def seat(self, owner: str) -> Seat:
        """For an owner that comes back step after step."""
        return Seat(self, owner)

    def _admit_next(self) -> None:
        """Under the lock, so that nobody can slip in between two owners."""
        if self._holder is None and self._waiting:
            self._holder = self._waiting.popleft()
            self._holder.state = TicketState.ADMITTED
            self._holder.on_turn()

    def check(self) -> None:
        """Raises AssertionError for a device that is free while somebody waits."""
        with self._lock:
            assert self._holder is not None or not self._waiting, "free, and somebody waits"
            states = {ticket.state for ticket in self._waiting}
            assert states <= {TicketState.WAITING}, "a ticket waits that is not waiting"


class Seat:
    """An engine's own way to the device. While it waits, `nudge` lets its thread look after
    what cannot wait as long: cancelled requests, a shutdown."""

    def __init__(self, gate: DeviceGate, owner: str) -> None:
        self._gate = gate
        self._owner = owner
        self._wake = threading.Event()

    def nudge(self) -> None:
        """From any thread."""
        self._wake.set()

    @contextmanager
    def hold(self, meanwhile: Callable[[], bool]) -> Generator[bool]:
        """Wait for the device and hold it. `meanwhile` is called after each nudge during the
        wait; False gives up, and the block runs without the device. Gives whether it is held."""
        ticket = self._gate.enter(self._owner, self._wake.set)
        try:
            while ticket.state is TicketState.WAITING:
                self._wake.wait()
                self._wake.clear()
                if ticket.state is TicketState.WAITING and not meanwhile():
                    break
            yield ticket.state is TicketState.ADMITTED
        finally:
            self._gate.leave(ticket)
