"""How many cores a decode step uses: as many as are faster just now.

A step has over a hundred short parallel kernels, and each waits for its slowest thread. When
other programs (a client on the same machine, say) take a core, that wait is a time slice of
the system and fewer threads are several times faster. So short trials compare the present
number with another one and keep what wins. Results don't depend on it: a row's bits are the
same with any number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Steps between two trials: FIRST after a change, doubling up to LAST while nothing changes.
FIRST_INTERVAL, LAST_INTERVAL = 32, 512
#: Steps timed with each number in a trial; the quickest counts.
TRIAL_STEPS = 2
#: The other number must be this much faster to be taken.
WORTH_IT = 0.9
#: A step this many times slower than the trial promised, twice in a row, calls for another.
ALARM = 2.0


class DecodeThreads:
    """Call `begin` before and `end` after each decode step, on the engine's thread.

    `set_threads` puts a number into effect; `clock` is seconds.
    """

    def __init__(
        self,
        cores: int,
        set_threads: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.current = cores
        self._others = [n for n in sorted({cores - 1, cores // 2}, reverse=True) if 0 < n < cores]
        self._cores = cores
        self._set = set_threads
        self._clock = clock
        self._interval = FIRST_INTERVAL
        self._until_trial = FIRST_INTERVAL
        self._trial: list[int] = []  # numbers still to be timed in this trial
        self._times: dict[int, float] = {}
        self._rows = 0
        self._promised: float | None = None
        self._slow = 0
        self._in_effect = cores
        self._start = 0.0

    def begin(self) -> None:
        self.use(self._trial[0] if self._trial else self.current)
        self._start = self._clock()

    def end(self, rows: int) -> None:
        """`rows`: decode rows of the step; a trial only compares steps of equal size."""
        took = self._clock() - self._start
        if not self._others:
            return
        if self._trial:
            self._record(rows, took)
            return
        expected = self._promised if rows == self._rows else None
        self._slow = self._slow + 1 if expected and took > ALARM * expected else 0
        self._until_trial -= 1
        if self._until_trial <= 0 or self._slow >= 2:
            self._start_trial(rows)

    def use(self, threads: int | None = None) -> None:
        """Put a number into effect; None is all cores, for prefill."""
        threads = threads or self._cores
        if threads != self._in_effect:
            self._set(threads)
            self._in_effect = threads

    def _start_trial(self, rows: int) -> None:
        candidates = [self.current, *(n for n in (self._cores, *self._others) if n != self.current)]
        self._trial = [n for n in candidates for _ in range(TRIAL_STEPS)]
        self._times, self._rows, self._slow = {}, rows, 0

    def _record(self, rows: int, took: float) -> None:
        if rows != self._rows:
            self._trial, self._until_trial = [], FIRST_INTERVAL
            return
        threads = self._trial.pop(0)
        self._times[threads] = min(took, self._times.get(threads, took))
        if self._trial:
            return
        fastest = min(self._times, key=lambda n: self._times[n])
        if self._times[fastest] < WORTH_IT * self._times[self.current]:
            self.current, self._interval = fastest, FIRST_INTERVAL
        else:
            self._interval = min(LAST_INTERVAL, 2 * self._interval)
        self._promised = self._times[self.current]
        self._until_trial = self._interval
