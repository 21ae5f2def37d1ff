"""The fixed workloads every driver runs, and the values they yield.

A measurement holds every repeat, so that a reader can judge the spread; a workload that did
not run as described becomes `NotRun` with the reason, and has no speed to print.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from osaurus.errors import RequestFailed

#: Prompt of a decode workload: long enough to be a prompt, short enough to cost little.
DECODE_PROMPT_TOKENS = 32

_WORDS = (
    "river", "stone", "lantern", "harbor", "copper", "violin", "meadow", "thunder", "orchard",
    "compass", "velvet", "glacier", "pepper", "saddle", "window", "ember", "cedar", "falcon",
)  # fmt: skip

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`prefill`: one prompt of `prompt_tokens`, one token out. `decode`: `streams` requests
    at once, each `new_tokens` long; the rate counts while all of them decode."""

    kind: Kind
    prompt_tokens: int
    new_tokens: int
    streams: int = 1

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.prompt_tokens}"
        return f"decode {self.streams} stream" + ("s" if self.streams > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one workload: seconds to the first token (the slowest stream's) and the
    workload's rate in tokens per second."""

    ttft_s: float
    tokens_per_s: float


class DidNotRun(RequestFailed):
    """What ran was not the workload: no speed may be printed for it."""

    code = "bench_did_not_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    workload: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    workload: str
    reason: str


Outcome = Measurement | NotRun


def standard_workloads(
    *, prefill_tokens: int, new_tokens: int, streams: Sequence[int]
) -> list[Workload]:
    """Prefill, then decode at each width."""
    prefill = Workload(kind="prefill", prompt_tokens=prefill_tokens, new_tokens=1)
    decodes = [
        Workload(
            kind="decode",
            prompt_tokens=DECODE_PROMPT_TOKENS,
            new_tokens=new_tokens,
            streams=count,
        )
        for count in streams
    ]
    return [prefill, *decodes]


def outcomes(workload: Workload, samples: Sequence[Sample]) -> list[Outcome]:
    """The figures of one workload: its rate, and for a single stream its time to first token."""
    rates = tuple(sample.tokens_per_s for sample in samples)
    found: list[Outcome] = [Measurement(workload=workload.name, unit="tok/s", values=rates)]
    if workload.streams == 1:
        waits = tuple(1e3 * sample.ttft_s for sample in samples)
        found.append(
            Measurement(
                workload=f"first token after {workload.prompt_tokens} tokens",
                unit="ms",
                values=waits,
            )
        )
    return found


def random_words(random: Random, count: int) -> str:
    return " ".join(random.choice(_WORDS) for _ in range(count))


def random_prompts(
    workload: Workload, encode: Callable[[str], Sequence[int]], random: Random
) -> list[list[int]]:
    """One prompt a stream, of exactly `prompt_tokens` ids, that no cache has seen."""
    # A word is at least one token, so as many words as tokens are enough.
    texts = [random_words(random, workload.prompt_tokens) for _ in range(workload.streams)]
    return [list(encode(text))[: workload.prompt_tokens] for text in texts]


def shared_decode_rate(token_times: Sequence[Sequence[float]]) -> float:
    """Tokens per second of all streams together, counted only while every one of them was
    decoding: from the last stream's first token to the first stream's last.

    Raises `DidNotRun` when the streams never ran side by side.
    """
    start = max(times[0] for times in token_times)
    end = min(times[-1] for times in token_times)
    if end <= start:
        raise DidNotRun("the streams did not decode at the same time")
    count = sum(sum(start < moment <= end for moment in times) for times in token_times)
    return count / (end - start)
