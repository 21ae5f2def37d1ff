"""One device, one user at a time, first come first served.

Held for one engine step, one embedding forward or one model load, never for a whole stream.
Blocking and thread-safe: its callers are engine threads and loader threads, not the event loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager


class DeviceGate:
    """A FIFO mutex. `threading.Lock` lets a thread that releases and asks again overtake
    those that wait; two engines sharing a device would then starve each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, threading.Event]] = deque()
        self._owner: str | None = None

    @property
    def owner(self) -> str | None:
        """Who holds the device now, for diagnostics."""
        return self._owner

    @property
    def waiting(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(owner for owner, _ in self._waiting)

    @contextmanager
    def hold(self, owner: str) -> Generator[None]:
        """Wait for the device, hold it, hand it to the next in line. Not re-entrant."""
        self._acquire(owner)
        try:
            yield
        finally:
            self._release()

    def _acquire(self, owner: str) -> None:
        with self._lock:
            if self._owner is None:
                self._owner = owner
                return
            turn = threading.Event()
            self._waiting.append((owner, turn))
        turn.wait()

    def _release(self) -> None:
        with self._lock:
            # Ownership passes inside the lock, so that nobody can slip in between.
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                turn.set()
            else:
                self._owner = None
