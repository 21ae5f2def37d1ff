"""The rolling rate: slow to speak, and never fooled by bursts."""

from __future__ import annotations

import math

import pytest

from osaurus.engine.rate import RollingTokenRate


def _fed(*observations: tuple[int, float]) -> RollingTokenRate:
    rate = RollingTokenRate()
    for count, now in observations:
        rate.observe(count, now)
    return rate


def test_a_steady_stream_has_its_rate() -> None:
    rate = _fed(*((1, 0.02 * i) for i in range(200)))
    assert rate.current(0.02 * 199) == pytest.approx(50, rel=0.03)


def test_it_says_nothing_before_there_is_something_to_say() -> None:
    assert RollingTokenRate().current(5) is None
    assert _fed((1, 0.0), (1, 0.1), (1, 0.2)).current(0.5) is None  # three tokens
    assert _fed((100, 0.0)).current(0.39) is None


def test_a_burst_is_divided_by_the_time_that_it_took_to_come() -> None:
    rate = _fed((0, 0.0), (8, 1.0), (8, 1.001))
    assert rate.current(1.001) == pytest.approx(16 / 1.001)


def test_what_is_older_than_the_window_no_longer_counts() -> None:
    rate = _fed((30, 0.0), (3, 2.0))
    assert rate.current(2.0) == pytest.approx(2.0)
    assert rate.current(10.0) == 0.0


def test_at_the_end_the_engines_own_rate_is_preferred() -> None:
    rate = _fed((5, 0.0), (5, 1.0))
    assert rate.final(77.0) == 77.0
    for unusable in (None, 0.0, -1.0, math.nan, math.inf):
        assert rate.final(unusable) == pytest.approx(10.0)
    assert _fed((2, 0.0)).final(None) is None
