"""How many streams are using each model: the count that every path which frees memory awaits.

One event loop owns it; no locks. A name at zero is absent. A lease lives from "the model is
known to be resident" to "its stream has drained".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping


class ModelLease:
    """Reference counts by model id, with FIFO waiters for zero."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._waiters: dict[str, deque[asyncio.Future[None]]] = {}

    def acquire(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    def release(self, name: str) -> None:
        """Give one count back. A release too many changes nothing and wakes nobody."""
        count = self._counts.get(name, 0)
        if count == 0:
            return
        if count > 1:
            self._counts[name] = count - 1
            return
        del self._counts[name]
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    def active_names(self) -> list[str]:
        return sorted(self._counts)

    def snapshot(self) -> Mapping[str, int]:
        return dict(self._counts)

    async def wait_for_zero(self, name: str, timeout_s: float | None = None) -> bool:
        """True once nobody holds `name`; False when `timeout_s` passed first.

        Without a timeout the count is looked at again after each wake, since the name may
        have been acquired anew in between. With one, the first wake decides.
        """
        while self.count(name):
            waiter = asyncio.get_running_loop().create_future()
            queue = self._waiters.setdefault(name, deque())
            queue.append(waiter)
            try:
                async with asyncio.timeout(timeout_s):
                    await waiter
            except TimeoutError:
                return False
            finally:
                self._forget(name, waiter)
            if timeout_s is not None:
                return self.count(name) == 0
        return True

    def _forget(self, name: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiters.get(name)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiters[name]
