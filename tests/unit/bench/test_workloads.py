"""Proves the arithmetic of a bench and its refusal to print a speed for work not done."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from random import Random

import pytest

from osaurus.bench.inprocess import EngineRunner
from osaurus.bench.machine import Machine, read_machine, rss_bytes
from osaurus.bench.report import Report, Subject, as_json, as_text
from osaurus.bench.rounds import measure
from osaurus.bench.workloads import (
    DidNotRun,
    Measurement,
    NotRun,
    Sample,
    Workload,
    random_prompts,
    shared_decode_rate,
    standard_workloads,
)
from osaurus.types.cache import CacheStats
from osaurus.types.engine import CapacitySnapshot, GenerationRequest
from osaurus.types.events import Event, Info

DECODE = Workload(kind="decode", prompt_tokens=4, new_tokens=6, streams=3)
PREFILL = Workload(kind="prefill", prompt_tokens=16, new_tokens=1)


def _encode(text: str) -> list[int]:
    return [hash(word) % 1000 for word in text.split()]


class _Stream:
    def __init__(self, request_id: str, events: list[Event]) -> None:
        self.request_id = request_id
        self._events = events

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __aiter__(self) -> AsyncIterator[Event]:
        raise NotImplementedError

    def close(self) -> None: ...

    async def drained(self) -> None: ...


class _Engine:
    """Settles one token of every request in turn at the first read; `spoil` edits the infos."""

    max_context_tokens = 4096

    def __init__(self, spoil: Callable[[dict], None] = lambda _: None) -> None:
        self._spoil = spoil
        self.requests: list[GenerationRequest] = []
        self.is_cold = False

    def generate(self, request: GenerationRequest) -> list[_Stream]:
        self.requests.append(request)
        assert self.is_cold
        output = request.make_output()
        tokens = request.params.max_tokens or 0
        for token in range(tokens):
            output.push(token)
        fields = {"prompt_tokens": len(request.token_ids), "generated_tokens": tokens}
        self._spoil(fields)
        return [_Stream(request.request_id, [Info(**fields)])]

    def cancel(self, request_id: str) -> bool:
        raise NotImplementedError

    def update_max_batch_size(self, n: int) -> None:
        raise NotImplementedError

    def capacity_snapshot(self) -> CapacitySnapshot:
        raise NotImplementedError

    def cache_stats(self) -> CacheStats:
        raise NotImplementedError

    def clear_cache(self) -> None:
        self.is_cold = True

    def shutdown(self) -> None: ...


def _run(workload: Workload, spoil: Callable[[dict], None] = lambda _: None) -> Sample:
    prompts = random_prompts(workload, _encode, Random(0))
    return EngineRunner("ours", _Engine(spoil)).run_once(workload, prompts)


def test_the_shared_rate_counts_only_while_all_streams_decode() -> None:
    # Alone until 1.0 and after 2.0; between them 2 tokens of the one, 4 of the other.
    slow = [1.0, 1.5, 2.0]
    fast = [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25]
    assert shared_decode_rate([slow, fast]) == pytest.approx(6.0)


def test_streams_that_took_turns_have_no_shared_rate() -> None:
    with pytest.raises(DidNotRun, match="same time"):
        shared_decode_rate([[0.0, 1.0], [2.0, 3.0]])


def test_prompts_have_exactly_the_asked_length_and_differ() -> None:
    random = Random(1)
    first = random_prompts(DECODE, _encode, random)
    second = random_prompts(DECODE, _encode, random)
    assert {len(prompt) for prompt in first + second} == {DECODE.prompt_tokens}
    assert len(first) == DECODE.streams
    assert first != second


def test_a_prefill_is_timed_to_its_first_token() -> None:
    sample = _run(PREFILL)
    assert sample.tokens_per_s == pytest.approx(PREFILL.prompt_tokens / sample.ttft_s)


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ({"generated_tokens": 0, "stop_reason": "cancelled"}, "0 of 1 tokens came .cancelled"),
        ({"cached_prompt_tokens": 16}, "16 prompt tokens came from a cache"),
        ({"error": "out of blocks"}, "out of blocks"),
    ],
)
def test_work_that_was_not_done_has_no_speed(spoiled: dict, reason: str) -> None:
    with pytest.raises(DidNotRun, match=reason):
        _run(PREFILL, lambda fields: fields.update(spoiled))


def test_the_standard_workloads_are_prefill_then_each_width() -> None:
    names = [
        work.name for work in standard_workloads(prefill_tokens=512, new_tokens=9, streams=[1, 8])
    ]
    assert names == ["prefill 512", "decode 1 stream", "decode 8 streams"]


class _Runner:
    def __init__(self, name: str, values: Sequence[float], fails_on: str = "") -> None:
        self.name = name
        self.prompts: list[object] = []
        self._values = iter(values)
        self._fails_on = fails_on

    def run_once(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Sample:
        if workload.name == self._fails_on:
            raise DidNotRun("it is off")
        self.prompts.append(prompts)
        return Sample(ttft_s=0.5, tokens_per_s=next(self._values))


def test_rounds_alternate_with_equal_prompts_and_drop_the_warm_up() -> None:
    ours, peer = _Runner("ours", [9.0, 1.0, 2.0, 4.0]), _Runner("peer", [9.0, 3.0, 3.0, 3.0])
    found = measure([ours, peer], [PREFILL], _encode, repeats=3, warmup=1, seed=7)
    assert ours.prompts == peer.prompts
    rate, wait = found["ours"]
    assert isinstance(rate, Measurement)
    assert (rate.low, rate.median, rate.high) == (1.0, 2.0, 4.0)
    assert isinstance(wait, Measurement)
    assert (wait.unit, wait.median) == ("ms", 500.0)


def test_a_workload_that_did_not_run_is_reported_with_its_reason_in_both_forms() -> None:
    runner = _Runner("ours", [1.0] * 9, fails_on=DECODE.name)
    found = measure([runner], [PREFILL, DECODE], _encode, repeats=2, warmup=0, seed=7)
    assert found["ours"][-1] == NotRun(workload="decode 3 streams", reason="it is off")
    report = Report(
        model="m",
        machine=_MACHINE,
        subjects=(Subject(name="ours", outcomes=tuple(found["ours"]), facts={"mode": "x"}),),
        command="osaurus bench m",
        repeats=2,
    )
    text = as_text(report)
    assert "decode 3 streams             did not run\n" in text
    assert "ours, decode 3 streams: did not run: it is off" in text
    assert "prefill 16                   1.0 tok/s (1.0 to 1.0)" in text
    data = json.loads(json.dumps(as_json(report)))
    row = data["subjects"][0]["results"][-1]
    assert row == {"workload": "decode 3 streams", "ran": False, "reason": "it is off"}
    assert data["machine"]["isa"] == ["avx2"]


_MACHINE = Machine(
    system="Linux x86_64",
    cpu="a processor",
    cores=2,
    isa=("avx2",),
    memory_bytes=8_000_000_000,
    memory_available_bytes=4_000_000_000,
    load_average=0.1,
    python="3.11.7",
)


def test_the_machine_is_read_without_torch() -> None:
    machine = read_machine()
    assert machine.cores >= 1
    assert machine.memory_bytes >= machine.memory_available_bytes > 0
    assert machine.cpu
    assert rss_bytes() > 1_000_000
