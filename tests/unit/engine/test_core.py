"""Claims about the loop, on a small random model stepped by hand or on its own thread:
order and completeness of events, limits, cancelling, failing, preempting, forking, closing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.engine.core import BatchEngine
from osaurus.engine.request import Phase
from osaurus.errors import EngineShutdown, InvalidField, InvalidMaxBatchSize
from osaurus.models.base import ForwardBatch, ForwardOutput
from osaurus.types.engine import EngineConfig
from osaurus.types.events import Chunk, PrefillProgress
from tiny import Recorder, TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((40, 1, 2, 77, 130, 16, 17, 33))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "llama")
    return path


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windowed")
    save_tiny(path, "qwen2", use_sliding_window=True, sliding_window=40, max_window_layers=1)
    return path


def _engine(folder: Path, *, start: bool = False, clock: Any = None, **config: Any) -> BatchEngine:
    settings = {"kv_block_tokens": 16, "prefill_chunk_tokens": 32, **config}
    extra = {"clock": clock} if clock else {}
    return BatchEngine(
        load_tiny(folder),
        EngineConfig(**settings),
        token_bytes=TokenText().token_bytes,
        start=start,
        **extra,
    )


@pytest.fixture
def engine(folder: Path) -> Iterator[BatchEngine]:
    engine = _engine(folder)
    yield engine
    engine.check()
    engine.shutdown()
    assert engine.pool.used_bytes == 0


def _run(engine: BatchEngine, *streams: Any, limit: int = 2000) -> list[list[Any]]:
    """Step until all streams have ended; return their events."""
    boxes = [stream._mailbox for stream in streams]
    for _ in range(limit):
        if all(box.completed for box in boxes):
            break
        engine.step()
        engine.check()
    return [list(stream) for stream in streams]


def _alone(folder: Path, prompt: list[int], **params: Any) -> list[int]:
    engine = _engine(folder)
    (events,) = _run(engine, *engine.generate(ask("alone", prompt, **params)))
    engine.shutdown()
    return tokens_of(events)


def test_events_come_in_order_and_count_what_happened(engine: BatchEngine) -> None:
    (stream,) = engine.generate(ask("r", PROMPTS[4], max_tokens=5))
    engine.step()
    seen = [stream._mailbox.take_now()]  # read once while prefill runs
    (events,) = _run(engine, stream)
    events = seen + events
    progress = [e for e in events if isinstance(e, PrefillProgress)]
    assert events[: len(progress)] == progress, "progress only before the first token"
    assert progress[0].stage in ("queued", "prefill")
    assert (progress[-1].stage, progress[-1].completed) == ("complete", 130)
    assert [p.completed for p in progress] == sorted(p.completed for p in progress)
    info = info_of(events)
    assert (info.prompt_tokens, info.generated_tokens, info.stop_reason) == (130, 5, "length")
    assert info.prompt_time_s > 0
    assert len(tokens_of(events)) == 5


def test_requests_together_get_the_tokens_they_get_alone(folder: Path) -> None:
    kinds = [
        dict(max_tokens=12),
        dict(max_tokens=20, temperature=1.0, seed=5),
        dict(max_tokens=7, temperature=0.8, top_p=0.9, seed=6),
        dict(max_tokens=15, frequency_penalty=1.5, repetition_penalty=1.2),
        dict(max_tokens=3),
        dict(max_tokens=18, temperature=1.5, top_k=9, seed=7, presence_penalty=0.4),
        dict(max_tokens=9, logit_bias={11: 5.0}),
        dict(max_tokens=30, min_p=0.1, temperature=1.1, seed=8),
    ]
    alone = [_alone(folder, p, **k) for p, k in zip(PROMPTS, kinds, strict=True)]
    engine = _engine(folder)
    streams = [
        engine.generate(ask(f"r{i}", p, **k))[0]
        for i, (p, k) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    together = [tokens_of(events) for events in _run(engine, *streams)]
    assert together == alone
    assert engine.capacity_snapshot().active_count_high_watermark == 8
    engine.shutdown()


def test_admission_is_first_in_first_out_up_to_the_batch_size(folder: Path) -> None:
    engine = _engine(folder, max_batch_size=2)
    streams = [engine.generate(ask(f"r{i}", PROMPTS[5], max_tokens=4))[0] for i in range(4)]
    engine.step()
    snapshot = engine.capacity_snapshot()
    assert (snapshot.active_count, snapshot.pending_count) == (2, 2)
    assert [r.request_id for r in engine.scheduler.active] == ["r0", "r1"]
    engine.update_max_batch_size(3)
    engine.step()
    assert engine.capacity_snapshot().active_count == 3
    engine.update_max_batch_size(1)
    engine.step()
    assert engine.capacity_snapshot().active_count == 3, "lowering cancels nothing"
    for events in _run(engine, *streams):
        assert info_of(events).generated_tokens == 4
    with pytest.raises(InvalidMaxBatchSize):
        engine.update_max_batch_size(0)
    engine.shutdown()
    with pytest.raises(EngineShutdown):
        engine.update_max_batch_size(2)


def test_decoding_goes_on_while_another_prompt_is_prefilled(engine: BatchEngine) -> None:
    (short,) = engine.generate(ask("short", PROMPTS[1], max_tokens=50))
    engine.step()
    (long,) = engine.generate(ask("long", PROMPTS[4], max_tokens=2))
    engine.step()
    engine.step()
    active = {r.request_id: r for r in engine.scheduler.active}
    assert active["long"].phase is Phase.PREFILL
    assert 0 < active["long"].num_computed < 129
    assert len(active["short"].generated) == 3
    _run(engine, short, long)


def test_prefilling_requests_take_turns(engine: BatchEngine) -> None:
    prompts = [PROMPTS[4], PROMPTS[4][1:]]
    streams = [engine.generate(ask(f"r{i}", p, max_tokens=1))[0] for i, p in enumerate(prompts)]
    engine.step()
    engine.step()
    assert [r.num_computed for r in engine.scheduler.active] == [32, 32]
    _run(engine, *streams)


def test_an_end_token_ends_without_being_counted_or_shown(
    folder: Path, engine: BatchEngine
) -> None:
    greedy = _alone(folder, PROMPTS[0], max_tokens=10)
    first = greedy.index(greedy[4])
    (events,) = _run(
        engine, *engine.generate(ask("r", PROMPTS[0], stop=frozenset({greedy[4]}), max_tokens=10))
    )
    assert tokens_of(events) == greedy[:first]
    info = info_of(events)
    assert (info.stop_reason, info.generated_tokens) == ("stop", first)
    (events,) = _run(
        engine, *engine.generate(ask("r", PROMPTS[0], stop=frozenset({greedy[0]}), max_tokens=10))
    )
    assert events[-1].generated_tokens == 0
    (events,) = _run(
        engine,
        *engine.generate(
            ask("r", PROMPTS[0], stop=frozenset({greedy[4]}), max_tokens=10, ignore_eos=True)
        ),
    )
    assert tokens_of(events) == greedy


def test_a_pipeline_that_halts_ends_the_request_in_that_step(engine: BatchEngine) -> None:
    (events,) = _run(
        engine,
        *engine.generate(ask("r", PROMPTS[0], make_output=lambda: Recorder(halt_at=3))),
    )
    info = info_of(events)
    assert (info.stop_reason, info.stop_string, info.generated_tokens) == ("stop", "halt", 4)
    assert len(tokens_of(events)) == 3


def test_the_context_bounds_the_answer_and_refuses_a_longer_prompt(folder: Path) -> None:
    engine = _engine(folder, max_context_tokens=50)
    (events,) = _run(engine, *engine.generate(ask("r", PROMPTS[0], max_tokens=None)))
    info = info_of(events)
    assert (info.generated_tokens, info.stop_reason) == (10, "length")
    (stream,) = engine.generate(ask("r", PROMPTS[3]))
    info = info_of(list(stream))
    assert info.error_code == "context_length_exceeded"
    assert "77" in (info.error or "")
    engine.shutdown()


@pytest.mark.parametrize("prompt", [[], [320], [-1]])
def test_a_prompt_that_is_no_prompt_is_refused(engine: BatchEngine, prompt: list[int]) -> None:
    with pytest.raises(InvalidField, match="prompt"):
        engine.generate(ask("r", prompt))


def test_a_request_id_in_use_is_refused(engine: BatchEngine) -> None:
    (stream,) = engine.generate(ask("r", PROMPTS[0]))
    with pytest.raises(InvalidField, match="request_id"):
        engine.generate(ask("r", PROMPTS[0]))
    _run(engine, stream)


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_cancelling_takes_effect_within_a_step_and_spares_the_rest(
    folder: Path, engine: BatchEngine, steps: int
) -> None:
    (kept,) = engine.generate(ask("kept", PROMPTS[0], max_tokens=12))
    (gone,) = engine.generate(ask("gone", PROMPTS[4], max_tokens=40))
    for _ in range(steps):
        engine.step()
    assert engine.cancel("gone")
    engine.step()
    assert gone._mailbox.completed
    assert engine.capacity_snapshot().active_count == 1
    info = info_of(list(gone))
    assert (info.stop_reason, info.error) == ("cancelled", None)
    assert not engine.cancel("gone")
    assert not engine.cancel("unknown")
    (events,) = _run(engine, kept)
    assert tokens_of(events) == _alone(folder, PROMPTS[0], max_tokens=12)


def test_a_dropped_stream_cancels_its_choice_only(engine: BatchEngine) -> None:
    first, second = engine.generate(ask("r", PROMPTS[0], n=2, temperature=1.0, seed=3))
    engine.step()
    first.close()
    (events,) = _run(engine, second)
    assert info_of(events).generated_tokens == 16
    assert engine.stats.cancelled_requests == 1


def test_choices_share_the_prompts_blocks_and_get_what_they_get_alone(folder: Path) -> None:
    params = dict(temperature=1.0, max_tokens=10)
    alone = [_alone(folder, PROMPTS[3], seed=40 + i, **params) for i in range(3)]
    engine = _engine(folder)
    streams = engine.generate(ask("r", PROMPTS[3], n=3, seed=40, **params))
    while engine.stats.prefill_tokens < 76:
        engine.step()
    tables = [r.tables[0].blocks for r in engine.scheduler.active]
    full = 76 // 16
    assert tables[0][:full] == tables[1][:full] == tables[2][:full]
    assert [tokens_of(events) for events in _run(engine, *streams)] == alone
    assert engine.stats.prefill_tokens == 76, "the prompt was computed once"
    assert engine.scheduler.forks == 2
    engine.shutdown()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_choices_go_on_when_the_one_that_prefills_is_cancelled(folder: Path, steps: int) -> None:
    params = dict(temperature=1.0, max_tokens=6)
    engine = _engine(folder, max_batch_size=2)
    streams = engine.generate(ask("r", PROMPTS[3], n=3, seed=1, **params))
    for _ in range(steps):
        engine.step()
    streams[0].close()
    results = _run(engine, *streams[1:])
    assert tokens_of(results[0]) == _alone(folder, PROMPTS[3], seed=2, **params)
    assert tokens_of(results[1]) == _alone(folder, PROMPTS[3], seed=3, **params)
    engine.check()
    engine.shutdown()


@pytest.mark.parametrize("which", ["folder", "windowed"])
def test_preempted_requests_come_back_to_the_same_tokens(
    which: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(which)
    model = load_tiny(path)
    block = sum(16 * 2 * 2 * 16 * 4 for _ in model.layers_topology)
    params = dict(max_tokens=60, temperature=1.0)
    wanted = [_alone(path, PROMPTS[i], seed=i, **params) for i in range(6)]
    engine = _engine(path, kv_budget_bytes=14 * block)
    streams = [engine.generate(ask(f"r{i}", PROMPTS[i], seed=i, **params))[0] for i in range(6)]
    # Admission alone would keep them apart: let it reserve nothing.
    engine.scheduler._likely_missing = lambda request: [0] * len(request.tables)
    results = _run(engine, *streams)
    assert engine.scheduler.preemptions > 0
    assert [tokens_of(events) for events in results] == wanted
    engine.check()
    engine.shutdown()


def test_windowed_layers_hold_a_bounded_number_of_blocks(windowed: Path) -> None:
    engine = _engine(windowed, max_context_tokens=512)
    (stream,) = engine.generate(ask("r", PROMPTS[4], max_tokens=200))
    most = 0
    while not stream._mailbox.completed:
        engine.step()
        for request in engine.scheduler.active:
            most = max(most, len(request.tables[1].blocks))
    assert most <= (40 + 32) // 16 + 2
    assert info_of(list(stream)).generated_tokens == 200
    engine.shutdown()


class _Breakable:
    """The tiny model with a fault that a test switches on."""

    def __init__(self, folder: Path, poison: int) -> None:
        self.inner = load_tiny(folder)
        self.poison = poison
        self.nan = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: ForwardBatch, kv: Any) -> ForwardOutput:
        hit = (batch.token_ids == self.poison).any()
        if hit and not self.nan:
            raise RuntimeError("kernel fault")
        output = self.inner.forward(batch, kv)
        if hit and output.logits is not None:
            rows = (batch.token_ids[batch.logits_rows] == self.poison).unsqueeze(1)
            return ForwardOutput(logits=output.logits.masked_fill(rows, float("nan")))
        return output


@pytest.mark.parametrize(
    ("nan", "at"),
    [(False, "last prompt token"), (False, "inside the prompt"), (True, "last prompt token")],
)
def test_a_failing_request_ends_alone(folder: Path, nan: bool, at: str) -> None:
    model = _Breakable(folder, poison=300)
    model.nan = nan
    engine = BatchEngine(
        model,  # type: ignore[arg-type]
        EngineConfig(kv_block_tokens=16, prefill_chunk_tokens=32),
        token_bytes=TokenText().token_bytes,
        start=False,
    )
    (kept,) = engine.generate(ask("kept", PROMPTS[0], max_tokens=12))
    engine.step()
    bad = [*PROMPTS[5], 300] if at == "last prompt token" else [300, *PROMPTS[5]]
    (failing,) = engine.generate(ask("failing", bad))
    good, failed = _run(engine, kept, failing)
    assert tokens_of(good) == _alone(folder, PROMPTS[0], max_tokens=12)
    info = info_of(failed)
    assert info.stop_reason == "cancelled"
    assert info.error
    assert info.error_code == ("non_finite_logits" if nan else "request_failed")
    assert not engine.pool.used_bytes
    assert all(torch.isfinite(storage).all() for storage in engine.pool.storage)
    engine.shutdown()


def test_a_fault_in_the_output_pipeline_ends_that_request_alone(
    folder: Path, engine: BatchEngine
) -> None:
    (kept,) = engine.generate(ask("kept", PROMPTS[0], max_tokens=12))
    (failing,) = engine.generate(
        ask("failing", PROMPTS[5], make_output=lambda: Recorder(fail_at=2))
    )
    good, failed = _run(engine, kept, failing)
    assert tokens_of(good) == _alone(folder, PROMPTS[0], max_tokens=12)
    info = info_of(failed)
    assert "parser fault" in (info.error or "")
    assert info.generated_tokens == 3


def test_a_request_that_stands_still_is_ended_by_the_watchdog(folder: Path) -> None:
    now = [0.0]
    engine = _engine(folder, clock=lambda: now[0])
    (stream,) = engine.generate(ask("r", PROMPTS[0]))
    engine.step()
    engine.step()
    engine.scheduler.plan_decode = list  # a scheduler that forgets the request
    now[0] = 31.0
    engine.step()
    assert "no progress" in (info_of(list(stream)).error or "")
    engine.shutdown()


def test_shutdown_fails_closed_and_every_caller_waits_for_it(folder: Path) -> None:
    engine = _engine(folder, start=True, max_batch_size=1)
    streams = [engine.generate(ask(f"r{i}", PROMPTS[4], max_tokens=None))[0] for i in range(3)]
    closers = [threading.Thread(target=engine.shutdown) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(timeout=30)
        assert not closer.is_alive()
    assert engine._thread is not None
    assert not engine._thread.is_alive()
    for stream in streams:
        assert info_of(list(stream)).stop_reason == "cancelled"
    late = engine.generate(ask("late", PROMPTS[0], n=2))
    for stream in late:
        events = list(stream)
        assert len(events) == 1
        assert (events[0].stop_reason, events[0].prompt_tokens) == ("cancelled", 40)
    snapshot = engine.capacity_snapshot()
    assert snapshot.is_shutdown
    assert snapshot.nominal_available_count == 0
    engine.shutdown()
    engine.check()
    assert engine.pool.used_bytes == 0


def test_many_threads_may_submit_cancel_and_read_at_once(folder: Path) -> None:
    engine = _engine(folder, start=True)
    wanted = {i: _alone(folder, PROMPTS[i], max_tokens=8) for i in range(8)}
    wrong: list[str] = []

    def work(worker: int) -> None:
        for turn in range(6):
            which = (worker + turn) % 8
            (stream,) = engine.generate(ask(f"{worker}.{turn}", PROMPTS[which], max_tokens=8))
            if (worker + turn) % 3 == 0:
                engine.cancel(f"{worker}.{turn}")
                info_of(list(stream))
            elif tokens_of(list(stream)) != wanted[which]:
                wrong.append(f"{worker}.{turn}")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    engine.shutdown()
    assert not wrong
    engine.check()
    assert engine.pool.used_bytes == 0


def test_a_consumer_that_never_reads_blocks_nobody(engine: BatchEngine) -> None:
    (silent,) = engine.generate(ask("silent", PROMPTS[0], max_tokens=200))
    (reader,) = engine.generate(ask("reader", PROMPTS[5], max_tokens=200))
    _run(engine, reader)
    engine.step()
    events = list(silent)
    assert sum(isinstance(e, Chunk) for e in events) == 1
    assert info_of(events).generated_tokens == 200
