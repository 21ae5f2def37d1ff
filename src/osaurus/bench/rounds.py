"""All subjects through the same workloads in turns, so that a drift of the machine hits each.

In: runners that serve one workload at a time, and the tokenizer's encode. Every round draws new
prompts and gives the same ones to all. A runner that fails a workload is out of that workload
only, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from osaurus.bench.workloads import (
    DidNotRun,
    NotRun,
    Outcome,
    Sample,
    Workload,
    outcomes,
    random_prompts,
)


class Runner(Protocol):
    name: str

    def run_once(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Sample:
        """Raises `DidNotRun`."""
        ...


def measure(
    runners: Sequence[Runner],
    workloads: Sequence[Workload],
    encode: Callable[[str], Sequence[int]],
    *,
    repeats: int,
    warmup: int,
    seed: int,
    on_round: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Outcome]]:
    """The outcomes of each runner by its name. The first `warmup` rounds are not counted."""
    random = Random(seed)
    found: dict[str, list[Outcome]] = {runner.name: [] for runner in runners}
    for workload in workloads:
        samples: dict[str, list[Sample]] = {runner.name: [] for runner in runners}
        reasons: dict[str, str] = {}
        for number in range(warmup + repeats):
            on_round(f"{workload.name}, round {number + 1} of {warmup + repeats}")
            prompts = random_prompts(workload, encode, random)
            for runner in runners:
                if runner.name in reasons:
                    continue
                try:
                    samples[runner.name].append(runner.run_once(workload, prompts))
                except DidNotRun as error:
                    reasons[runner.name] = error.message
        for name, taken in samples.items():
            if name in reasons:
                found[name].append(NotRun(workload=workload.name, reason=reasons[name]))
            else:
                found[name].extend(outcomes(workload, taken[warmup:]))
    return found
