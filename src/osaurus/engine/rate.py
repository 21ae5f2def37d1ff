"""How fast tokens come just now: a rate over the last moments that no burst can inflate.

`observe` on one thread; `current` may be asked on another, which then sees the last whole state.
"""

from __future__ import annotations

import math

#: Seconds that the rate looks back.
WINDOW_S = 1.5
#: Before this much time and this many tokens there is no rate worth saying.
MIN_ELAPSED_S = 0.4
MIN_TOKENS = 4


class RollingTokenRate:
    """Tokens of the last `WINDOW_S`, divided by the time since the first observation where that
    is shorter. Never by the time between the tokens at hand: eight that come in one burst would
    make thousands a second."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last: float | None = None
        self._total = 0
        self._recent: tuple[tuple[float, int], ...] = ()

    def observe(self, count: int, now: float) -> None:
        """`count` tokens came at `now`, monotonic seconds; 0 only lets time pass."""
        self._first = now if self._first is None else self._first
        self._last = now
        self._total += count
        kept = [entry for entry in self._recent if entry[0] > now - WINDOW_S]
        self._recent = (*kept, (now, count)) if count else tuple(kept)

    def current(self, now: float) -> float | None:
        """Tokens a second, or None while it is too early to say."""
        if self._first is None or self._total < MIN_TOKENS:
            return None
        elapsed = now - self._first
        if elapsed < MIN_ELAPSED_S:
            return None
        count = sum(tokens for at, tokens in self._recent if at > now - WINDOW_S)
        return count / min(WINDOW_S, elapsed)

    def final(self, engine_rate: float | None) -> float | None:
        """What to say at the end: the engine's own rate where it is a number above zero."""
        if engine_rate is not None and math.isfinite(engine_rate) and engine_rate > 0:
            return engine_rate
        return None if self._last is None else self.current(self._last)
