"""The consumer's face of a request: a mailbox that never makes the engine wait, and a stream.

The engine's thread appends and goes on; a consumer that is slow finds adjacent text joined
and old progress replaced, so memory is bounded by the text of `max_tokens` tokens. This is
the only bridge between the engine's thread and asyncio.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from osaurus.types.events import Chunk, Event, Info, PrefillProgress, Reasoning


class Mailbox:
    """Events of one choice, in order. Thread-safe: `put` on the engine's thread, `take` on
    the consumer's. The lock guards the deque and the waiter; nothing is called under it."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.completed = False  #: set before `Info` can be read
        self.drained = threading.Event()  #: the engine has let go of the request
        self._on_drained: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def put(self, event: Event) -> None:
        """Append without waiting, merging with an unread neighbour where order allows."""
        with self._lock:
            if isinstance(event, Info):
                self.completed = True
            last = self._events[-1] if self._events else None
            if isinstance(event, Chunk) and isinstance(last, Chunk):
                self._events[-1] = Chunk(last.text + event.text, last.logprobs + event.logprobs)
            elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
                self._events[-1] = Reasoning(last.text + event.text, last.logprobs + event.logprobs)
            elif _is_newer(event, last):
                self._events[-1] = event
            else:
                self._events.append(event)
            self._filled.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            _wake(*waiter)

    def take(self) -> Event:
        """The next event; waits for it."""
        with self._lock:
            while not self._events:
                self._filled.wait()
            return self._events.popleft()

    def take_now(self) -> Event | None:
        with self._lock:
            return self._events.popleft() if self._events else None

    async def take_async(self) -> Event:
        while True:
            loop = asyncio.get_running_loop()
            with self._lock:
                if self._events:
                    return self._events.popleft()
                future: asyncio.Future[None] = loop.create_future()
                self._waiter = (loop, future)
            await future

    def mark_drained(self) -> None:
        with self._lock:
            self.drained.set()
            waiting, self._on_drained = self._on_drained, []
        for loop, event in waiting:
            _call_soon(loop, event.set)

    async def wait_drained(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self.drained.is_set():
                return
            self._on_drained.append((asyncio.get_running_loop(), event))
        await event.wait()


def _is_newer(event: Event, last: Event | None) -> bool:
    """Whether progress says the same as unread progress, only further on."""
    return (
        isinstance(event, PrefillProgress)
        and isinstance(last, PrefillProgress)
        and event.stage == last.stage
    )


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def finish() -> None:
        if not future.done():
            future.set_result(None)

    _call_soon(loop, finish)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        # The loop closed while the engine worked: there is no consumer left to wake.
        if not loop.is_closed():
            raise


def _nothing() -> None:
    pass


class Stream:
    """Implements `types.engine.EventStream`. Dropping it before `Info` cancels its choice. One
    that has ended holds nothing of its engine."""

    def __init__(self, request_id: str, mailbox: Mailbox, cancel: Callable[[], object]) -> None:
        self.request_id = request_id
        self._mailbox = mailbox
        self._cancel = cancel
        self._ended = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        return self._passed(self._mailbox.take())

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        return self._passed(await self._mailbox.take_async())

    def _passed(self, event: Event) -> Event:
        if isinstance(event, Info):
            self._ended = True
            self._cancel = _nothing
        return event

    def close(self) -> None:
        """Stop reading. Cancels the choice unless its `Info` was already delivered."""
        self._ended = True
        if not self._mailbox.completed:
            self._cancel()
        self._cancel = _nothing

    async def aclose(self) -> None:
        self.close()

    async def drained(self) -> None:
        await self._mailbox.wait_drained()

    def __del__(self) -> None:
        if not self._ended and not self._mailbox.completed:
            self._cancel()
