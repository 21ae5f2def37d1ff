"""An event loop whose time and blocking calls belong to the test: every order of events can be
made, and made again.

`VirtualLoop.turn` runs what is ready once; nothing sleeps. `Blocking` parks every blocking call
until the test says that it has ended.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


class _NoSelector(selectors.BaseSelector):
    """Nothing ever becomes readable: time alone makes progress."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now` is its time in seconds. With `order` the callbacks that are ready run in an order of
    its choosing, as they may in earnest where they come from threads."""

    def __init__(self, order: random.Random | None = None) -> None:
        self.now = 1000.0
        self.errors: list[dict[str, Any]] = []
        self._order = order
        super().__init__(_NoSelector())
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self.now

    def turn(self) -> None:
        """One pass over what is ready."""
        if self._order is not None and len(self._ready) > 1:
            ready = list(self._ready)
            self._order.shuffle(ready)
            self._ready.clear()
            self._ready.extend(ready)
        self.call_soon(self.stop)
        self.run_forever()

    def settle(self) -> None:
        """Turn until nothing is ready."""
        while self._ready:
            self.turn()

    def advance(self, seconds: float) -> None:
        """Let timers that are due run one after the other, at their own times."""
        end = self.now + seconds
        while self._scheduled and min(h.when() for h in self._scheduled) <= end:
            self.now = max(self.now, min(h.when() for h in self._scheduled))
            self.turn()
            self.settle()
        self.now = end
        self.turn()


@dataclass(eq=False)
class Call:
    """A blocking call that has begun."""

    function: Callable[[], Any]
    future: asyncio.Future[Any]

    def end(self) -> None:
        """Run it and deliver what it returned or raised, as a thread does: to nobody, where the
        caller has left."""
        outcome: Any = None
        failure: Exception | None = None
        try:
            outcome = self.function()
        except Exception as raised:  # noqa: BLE001 - delivered to who awaits it
            failure = raised
        if self.future.done():
            return
        if failure is not None:
            self.future.set_exception(failure)
        else:
            self.future.set_result(outcome)


class Blocking:
    """Stands for `on_thread`. With `is_immediate` calls end as they begin."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_immediate = False

    def __call__(self, function: Callable[[], _T]) -> Awaitable[_T]:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        call = Call(function, future)
        if self.is_immediate:
            call.end()
        else:
            self.calls.append(call)
        return future

    def end(self, index: int = 0) -> None:
        self.calls.pop(index).end()
