"""Claims: where one call runs all rows, a prompt's chunk goes with the rows that decode; the
answers are those of requests that ran alone, also when that forward fails, when room for the chunk
costs a stream its memory, and where rows may not go together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from osaurus.engine.core import BatchEngine
from osaurus.engine.request import Phase
from osaurus.kernels.cpu import has_amx
from osaurus.kernels.native.library import native
from osaurus.models.base import ForwardBatch, ForwardOutput, Model
from osaurus.types.cache import CacheConfig, KVMode
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

pytestmark = [
    pytest.mark.skipif(native().library is None, reason=native().reason),
    pytest.mark.skipif(has_amx(), reason="prompts take torch's products there"),
]
SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
LONG = [3 + (11 * i) % 290 for i in range(200)]
SHORT = [3 + (7 * i) % 280 for i in range(9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama", **SIZES)
    return load_tiny(folder, "bfloat16")


class _Watched:
    """A model that notes the rows of each forward's spans and may fail at one."""

    def __init__(self, inner: Model, fault: Callable[[ForwardBatch], bool] | None = None) -> None:
        self._inner, self._fault = inner, fault
        self.spans: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: ForwardBatch, kv: Any) -> ForwardOutput:
        self.spans.append([b - a for a, b in pairwise(batch.q_start)])
        if self._fault is not None and self._fault(batch):
            raise RuntimeError("a fault in this forward")
        return self._inner.forward(batch, kv)


def _is_joint(spans: Sequence[int]) -> bool:
    return len(spans) > 1 and max(spans) >= 16


def _engine(model: Any, **config: Any) -> BatchEngine:
    config = {"kv_block_tokens": 32, "prefill_chunk_tokens": 64, **config}
    return BatchEngine(
        model, EngineConfig(**config), token_bytes=TokenText().token_bytes, start=False
    )


def _answers(engine: BatchEngine, asked: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
    """Each is asked when the one before it has an answer's beginning."""
    heard: list[list[Any]] = []
    streams = []
    for index, (prompt, count) in enumerate(asked):
        (stream,) = engine.generate(ask(f"r{index}", prompt, max_tokens=count))
        streams.append(stream)
        for _ in range(2):
            engine.step()
    while engine.scheduler.active or engine.scheduler.waiting:
        engine.step()
    engine.check()
    for stream in streams:
        heard.append(list(stream))
        assert info_of(heard[-1]).stop_reason == "length"
    engine.shutdown()
    return [tokens_of(events) for events in heard]


ASKED = [(SHORT, 60), (SHORT[::-1], 50), (LONG, 20), (LONG[::-1], 10)]


@pytest.fixture(scope="module")
def alone(model: Model) -> list[list[int]]:
    return [_answers(_engine(model), [asked])[0] for asked in ASKED]


def test_a_chunk_goes_with_the_rows_that_decode(model: Model, alone: list[list[int]]) -> None:
    watched = _Watched(model)
    assert _answers(_engine(watched), ASKED) == alone
    joint = [spans for spans in watched.spans if _is_joint(spans)]
    assert len(joint) >= 6
    assert all(spans[-1] > 1 and set(spans[:-1]) == {1} for spans in joint)
    # Nothing waits for itself: no chunk alone while there are streams, no step with both apart.
    first = watched.spans.index(joint[0])
    assert not [s for s in watched.spans[first:] if len(s) == 1 and s[0] >= 16]


def test_what_answers_leave_is_said_to_be_exact_where_it_is(model: Model) -> None:
    for options, said in (
        ({}, "exact"),
        ({"cache": CacheConfig(reuse_generated=False)}, "not reused"),
        ({"cache": CacheConfig(kv_mode=KVMode.parse("turbo(3,3)"))}, "approximate"),
    ):
        engine = _engine(model, **options)
        assert engine.cache_stats().generated_kv == said
        engine.shutdown()


def test_a_joint_forward_that_fails_is_run_in_parts(model: Model, alone: list[list[int]]) -> None:
    watched = _Watched(model, lambda batch: len(batch.kv_len) > 1 and batch.num_rows > 16)
    engine = _engine(watched)
    assert _answers(engine, ASKED) == alone
    assert engine.stats.forward_retries > 0
    assert engine.stats.failed_requests == 0


def test_a_chunk_at_fault_ends_its_own_request_only(model: Model, alone: list[list[int]]) -> None:
    def at_fault(batch: ForwardBatch) -> bool:
        return LONG[40] in batch.token_ids.tolist() and batch.num_rows > 16

    engine = _engine(_Watched(model, at_fault))
    (running,) = engine.generate(ask("running", SHORT, max_tokens=60))
    engine.step()
    engine.step()
    (ill,) = engine.generate(ask("ill", LONG, max_tokens=5))
    while engine.scheduler.active or engine.scheduler.waiting:
        engine.step()
    assert tokens_of(list(running)) == alone[0]
    assert "a fault in this forward" in (info_of(list(ill)).error or "")
    engine.check()
    engine.shutdown()


def test_room_for_a_chunk_may_cost_the_newest_its_own(model: Model, alone: list[list[int]]) -> None:
    engine = _engine(model)
    scheduler, plan = engine.scheduler, engine.scheduler.plan_prefill

    def plan_in_a_full_pool() -> Any:
        span = plan()
        if span is not None and scheduler.preemptions < 3:
            decoding = [r for r in scheduler.active if r.phase is Phase.DECODE]
            if decoding and decoding[-1] is not span.request:
                scheduler.preempt(decoding[-1])
        return span

    scheduler.plan_prefill = plan_in_a_full_pool  # type: ignore[method-assign]
    assert _answers(engine, ASKED) == alone
    assert scheduler.preemptions == 3


def test_rows_that_may_not_go_together_do_not(model: Model, alone: list[list[int]]) -> None:
    watched = _Watched(model)
    assert _answers(_engine(watched, decode_batch_size=1), ASKED) == alone
    together = [spans for spans in watched.spans if len(spans) > 1]
    assert all(len(spans) == 2 and spans[0] == 1 for spans in together)
