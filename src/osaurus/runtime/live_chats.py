"""How many interactive requests are under way: background work waits here for a quiet moment.

One event loop owns it. A request counts from the moment in which it asks for its model.
"""

from __future__ import annotations

from osaurus.runtime.lease import ModelLease

_ALL = "chats"


class LiveChats:
    def __init__(self) -> None:
        self._lease = ModelLease()

    def begin(self) -> None:
        self._lease.acquire(_ALL)

    def end(self) -> None:
        """An end too many changes nothing."""
        self._lease.release(_ALL)

    @property
    def count(self) -> int:
        return self._lease.count(_ALL)

    async def wait_idle(self, timeout_s: float | None = None) -> bool:
        """True once no chat is live; False when `timeout_s` passed first. May be cancelled."""
        return await self._lease.wait_for_zero(_ALL, timeout_s)
