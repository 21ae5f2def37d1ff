"""One value a key: made once however many ask, and never handed out while it is taken down.

    absent --value--> creating --ok--> there --remove--> draining --disposed--> absent
       ^                 |                                  ^
       +-----failed------+------------remove----------------+

A creation that was removed is never stored: who waited for it waits for its disposal and has the
value made afresh. One event loop owns it; no locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Made(Generic[T]):
    """A creation's outcome as a value: one that nobody reads is then no unread exception."""

    value: T | None = None
    error: BaseException | None = None


class SingleFlight(Generic[T]):
    """`on_value` is called in the moment in which a value becomes there, before anybody else
    can see it."""

    def __init__(self, on_value: Callable[[str, T], None] | None = None) -> None:
        self._on_value = on_value
        self._values: dict[str, T] = {}
        self._creating: dict[str, asyncio.Task[_Made[T]]] = {}
        self._draining: dict[str, asyncio.Task[T | None]] = {}
        self._removed: dict[str, asyncio.Task[_Made[T]]] = {}  # creations that drain

    def get(self, key: str) -> T | None:
        return self._values.get(key)

    def names(self) -> list[str]:
        """Keys whose value is there."""
        return sorted(self._values)

    def creating(self) -> list[str]:
        return sorted(self._creating)

    def draining(self) -> list[str]:
        return sorted(self._draining)

    async def value(
        self,
        key: str,
        factory: Callable[[], Awaitable[T]],
        *,
        is_claimed: Callable[[], bool] = lambda: False,
    ) -> T:
        """The value, made by `factory` when there is none. A caller that is cancelled leaves
        the creation to the others. Raises what the factory raised, to every caller.

        A value whose removal began before its caller came back to it is not handed out: the
        caller waits and has another made. Unless `is_claimed`: `on_value` has given the caller
        a claim on this very value, and the disposal waits for that.
        """
        while True:
            if key in self._draining:
                await asyncio.wait({self._draining[key]})
            elif key in self._values:
                return self._values[key]
            else:
                task = self._creating.get(key)
                if task is None:
                    task = asyncio.create_task(self._create(key, factory))
                    self._creating[key] = task
                await asyncio.wait({task})
                made = task.result()
                if made.error is not None:
                    raise made.error.with_traceback(None)
                if made.value is not None and is_claimed():
                    return made.value

    async def remove(
        self,
        key: str,
        dispose: Callable[[T], Awaitable[object]],
        *,
        expected: T | None = None,
    ) -> T | None:
        """Take the value away and return when `dispose` is done with it. Of several callers
        one gets the value, the others None, all after the disposal. With `expected` only
        that very value is removed. A caller that is cancelled leaves the disposal to end."""
        if expected is not None and self._values.get(key) is not expected:
            return None
        task = self._start_draining(key, dispose)
        if task is not None:
            await asyncio.wait({task})
            return None if task.cancelled() else task.result()
        if key in self._draining:
            await asyncio.wait({self._draining[key]})
        return None

    async def remove_all(self, dispose: Callable[[T], Awaitable[object]]) -> None:
        keys = {*self._values, *self._creating}
        tasks = {task for key in keys if (task := self._start_draining(key, dispose))}
        tasks.update(self._draining.values())
        if tasks:
            await asyncio.wait(tasks)

    async def drained(self) -> None:
        """Return when every value is disposed of that was there to be taken down. A creation
        that was removed and runs on is not waited for: it may be the caller's own."""
        while tasks := {
            task
            for key, task in self._draining.items()
            if key not in self._removed or self._removed[key].done()
        }:
            await asyncio.wait(tasks)

    def abandon(self) -> None:
        """At the end of the process: cancel what is under way, dispose of nothing."""
        for task in (*self._creating.values(), *self._draining.values()):
            task.cancel()
        self._values.clear()

    def check(self) -> None:
        """Raises AssertionError when a key is in two states."""
        states = [*self._values, *self._creating, *self._draining]
        assert len(set(states)) == len(states), f"a key is in two states: {sorted(states)}"

    def _start_draining(
        self, key: str, dispose: Callable[[T], Awaitable[object]]
    ) -> asyncio.Task[T | None] | None:
        drain: Coroutine[Any, Any, T | None]
        creation = self._creating.pop(key, None)
        if creation is not None:
            self._removed[key] = creation
            drain = self._drain_creation(key, creation, dispose)
        elif key in self._values:
            drain = self._drain(key, self._values.pop(key), dispose)
        else:
            return None
        task = self._draining[key] = asyncio.create_task(drain)
        return task

    async def _create(self, key: str, factory: Callable[[], Awaitable[T]]) -> _Made[T]:
        this = asyncio.current_task()
        made: _Made[T]
        try:
            made = _Made(value=await factory())
        except BaseException as error:  # noqa: BLE001 - raised again by every `value`
            made = _Made(error=error)
        if self._creating.get(key) is this:
            del self._creating[key]
            if made.error is None and made.value is not None:
                self._values[key] = made.value
                if self._on_value is not None:
                    self._on_value(key, made.value)
        return made

    async def _drain_creation(
        self,
        key: str,
        creation: asyncio.Task[_Made[T]],
        dispose: Callable[[T], Awaitable[object]],
    ) -> T | None:
        made: _Made[T] = _Made()
        try:
            await asyncio.wait({creation})
            made = creation.result()
        finally:
            del self._removed[key]
            if made.value is None:
                del self._draining[key]
        return None if made.value is None else await self._drain(key, made.value, dispose)

    async def _drain(self, key: str, value: T, dispose: Callable[[T], Awaitable[object]]) -> T:
        try:
            await dispose(value)
        except Exception:
            logger.exception("%s: taking it down failed", key)
        finally:
            del self._draining[key]
        return value
