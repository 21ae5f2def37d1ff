"""Counts by name that several threads add to."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """The lock is there because `+=` on a shared number loses counts between threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
