"""Claim: decode uses the number of threads that is faster just now, and notices a change."""

from __future__ import annotations

from osaurus.engine.decode_threads import LAST_INTERVAL, DecodeThreads


class _Machine:
    """A clock whose steps take what a number of threads costs at the moment."""

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = costs
        self.now = 0.0
        self.threads = max(costs)
        self.used: list[int] = []
        self.chooser = DecodeThreads(max(costs), self._set, lambda: self.now)

    def _set(self, threads: int) -> None:
        self.threads = threads

    def steps(self, count: int, rows: int = 1) -> None:
        for _ in range(count):
            self.chooser.begin()
            self.used.append(self.threads)
            self.now += self.costs[self.threads] * rows
            self.chooser.end(rows)


def test_all_cores_stay_while_they_are_faster_and_trials_become_rare() -> None:
    machine = _Machine({2: 1.0, 1: 1.4})
    machine.steps(4000)
    assert machine.chooser.current == 2
    assert machine.used.count(1) < 4000 * 0.01 + 8


def test_a_core_that_others_take_is_given_up_within_a_few_steps() -> None:
    machine = _Machine({2: 1.0, 1: 1.4})
    machine.steps(200)
    machine.costs = {2: 8.0, 1: 1.6}
    machine.steps(10)
    assert machine.chooser.current == 1
    machine.costs = {2: 1.0, 1: 1.4}
    machine.steps(LAST_INTERVAL + 10)
    assert machine.chooser.current == 2


def test_steps_of_different_sizes_are_not_compared() -> None:
    machine = _Machine({2: 1.0, 1: 0.95})
    for rows in range(1, 400):
        machine.steps(1, rows)
    assert machine.chooser.current == 2


def test_one_core_leaves_nothing_to_try() -> None:
    machine = _Machine({1: 1.0})
    machine.steps(100)
    assert set(machine.used) == {1}


def test_more_cores_are_tried_one_less_and_by_half() -> None:
    machine = _Machine({8: 5.0, 7: 2.0, 4: 3.0})
    machine.steps(200)
    assert machine.chooser.current == 7


def test_prefill_takes_all_cores_back() -> None:
    machine = _Machine({2: 8.0, 1: 1.0})
    machine.steps(100)
    assert machine.threads == 1
    machine.chooser.use()
    assert machine.threads == 2
    machine.steps(1)
    assert machine.threads == 1
