"""What an engine sees to while nobody asks for anything: prefixes that were not used for too long
go, and in a light sleep all of those that memory holds. What is on disk stays there.
"""

from __future__ import annotations

from collections.abc import Callable

from osaurus.cache.blocks import BlockPool
from osaurus.cache.coordinator import CacheCoordinator
from osaurus.kernels.heap import trim_heap


class IdleCare:
    """The engine's thread owns it. Times are the clock's seconds; `sleep_s` None never sleeps."""

    def __init__(
        self,
        cache: CacheCoordinator,
        pool: BlockPool,
        *,
        sleep_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._sleep_s = sleep_s
        self._clock = clock
        self._idle_since: float | None = None
        self._is_asleep = False

    def due_in(self) -> float | None:
        """Seconds until there is something to do if nobody comes, None for never. Called by
        an engine that has nothing else to do."""
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        times = [self._cache.expires_at]
        if self._sleep_s is not None and not self._is_asleep:
            times.append(self._idle_since + self._sleep_s)
        return min((max(0.0, at - now) for at in times if at is not None), default=None)

    def run(self, *, is_busy: bool) -> None:
        """Do what is due; costs nearly nothing when nothing is."""
        now = self._clock()
        self._cache.expire(now)
        if is_busy:
            self._idle_since, self._is_asleep = None, False
        elif self._is_asleep or self._sleep_s is None or self._idle_since is None:
            return
        elif now >= self._idle_since + self._sleep_s and not self._cache.has_work:
            self._cache.forget_memory()
            self._pool.give_back_pages()
            trim_heap()
            self._is_asleep = True
