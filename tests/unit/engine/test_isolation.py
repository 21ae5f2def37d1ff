"""Claims: nothing of a broken request reaches another one's blocks, no wait kills a healthy
request, and an engine that ends reaches every consumer.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.engine.core import BatchEngine
from osaurus.engine.request import Phase
from osaurus.engine.scheduler import RowSpan
from osaurus.models.base import ForwardBatch, ForwardOutput
from osaurus.types.engine import EngineConfig
from osaurus.types.events import PrefillProgress
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

PROMPT = list(range(3, 120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windowed")
    save_tiny(path, "mistral", head_dim=16, sliding_window=32)
    return path


class _Leaky:
    """The tiny model, whose keys and values for one token are not finite."""

    def __init__(self, folder: Path, token: int) -> None:
        self.inner = load_tiny(folder)
        self.token = token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: ForwardBatch, kv: Any) -> ForwardOutput:
        output = self.inner.forward(batch, kv)
        bad = (batch.token_ids == self.token).nonzero().flatten()
        for layer in kv:
            heads, size = layer.storage.shape[1:3]
            for row in bad.tolist():
                slot = int(batch.slot_mapping[layer.group][row])
                layer.storage[slot // size, :heads, slot % size] = float("nan")
        return output


def _engine(model: Any, **settings: Any) -> BatchEngine:
    clock = settings.pop("clock", None)
    return BatchEngine(
        model,
        EngineConfig(**{"kv_block_tokens": 16, "prefill_chunk_tokens": 32, **settings}),
        token_bytes=TokenText().token_bytes,
        start=False,
        **({"clock": clock} if clock else {}),
    )


def _finish(engine: BatchEngine, *streams: Any) -> list[list[Any]]:
    while not all(stream._mailbox.completed for stream in streams):
        engine.step()
        engine.check()
    return [list(stream) for stream in streams]


def _stored_values_are_finite(engine: BatchEngine) -> bool:
    return all(bool(torch.isfinite(storage).all()) for storage in engine.pool.storage)


def _free_values_are_finite(engine: BatchEngine) -> bool:
    pool = engine.pool
    return all(
        bool(torch.isfinite(storage[:, free]).all())
        for storage, free in zip(pool.storage, pool._free, strict=True)
    )


def test_values_that_left_the_window_are_cleared_with_their_block(folder: Path) -> None:
    engine = _engine(_Leaky(folder, token=300))
    _finish(engine, *engine.generate(ask("bad", [300, *PROMPT], max_tokens=4)))
    assert _stored_values_are_finite(engine)
    engine.shutdown()


def test_a_preempted_prefill_leaves_clean_blocks(folder: Path) -> None:
    engine = _engine(_Leaky(folder, token=300))
    (stream,) = engine.generate(ask("bad", [300, *PROMPT]))
    engine.step()
    engine.scheduler.preempt(engine.scheduler.active[0])
    assert _free_values_are_finite(engine)
    assert not _stored_values_are_finite(engine), "the cache keeps them for the same prompt"
    (events,) = _finish(engine, stream)
    assert info_of(events).error_code == "non_finite_logits"
    assert _stored_values_are_finite(engine)
    engine.shutdown()


def test_unproven_blocks_are_cleared_when_they_are_evicted(folder: Path) -> None:
    engine = _engine(_Leaky(folder, token=300))
    (stream,) = engine.generate(ask("bad", [300, *PROMPT]))
    engine.step()
    stream.close()
    engine.step()
    assert engine.pool.cached_blocks
    engine.clear_cache()
    engine.step()
    assert not engine.pool.cached_blocks
    assert _stored_values_are_finite(engine)
    engine.shutdown()


def test_progress_never_goes_back_after_a_preemption(folder: Path) -> None:
    engine = _engine(load_tiny(folder))
    (stream,) = engine.generate(ask("r", PROMPT, max_tokens=1))
    seen: list[int] = []
    for turn in range(40):
        engine.step()
        event = stream._mailbox.take_now()
        while event is not None:
            if isinstance(event, PrefillProgress):
                seen.append(event.completed)
            event = stream._mailbox.take_now()
        if turn == 2:
            engine.scheduler.preempt(engine.scheduler.active[0])
        if stream._mailbox.completed:
            break
    assert seen == sorted(seen)
    assert seen[-1] == len(PROMPT)
    engine.shutdown()


def test_a_choice_that_waits_for_a_long_prefill_is_not_taken_for_dead(folder: Path) -> None:
    now = [0.0]
    engine = _engine(load_tiny(folder), clock=lambda: now[0])
    streams = engine.generate(ask("r", PROMPT, n=2, max_tokens=2, temperature=1.0, seed=1))
    while not all(stream._mailbox.completed for stream in streams):
        engine.step()
        now[0] += 20.0
    assert all(info_of(list(stream)).error is None for stream in streams)
    engine.shutdown()


def test_catching_up_after_a_preemption_counts_as_progress(folder: Path) -> None:
    now = [0.0]
    engine = _engine(load_tiny(folder), clock=lambda: now[0])
    (stream,) = engine.generate(ask("r", PROMPT[:20], max_tokens=90))
    while len(engine.scheduler.active[0].generated if engine.scheduler.active else []) < 80:
        engine.step()
    engine.scheduler.preempt(engine.scheduler.active[0])
    while not stream._mailbox.completed:
        engine.step()
        now[0] += 10.0
    assert info_of(list(stream)).error is None
    engine.shutdown()


def test_a_stream_collected_under_the_engines_lock_does_not_lock_it_up(folder: Path) -> None:
    engine = _engine(load_tiny(folder))
    (stream,) = engine.generate(ask("r", PROMPT))
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    done = threading.Event()

    def collect() -> None:
        with engine._lock:
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(timeout=20)
    engine.step()
    assert engine.stats.cancelled_requests == 1
    engine.shutdown()


def test_every_consumer_hears_of_the_end_when_blocks_cannot_be_released(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(load_tiny(folder))
    streams = [engine.generate(ask(f"r{i}", PROMPT))[0] for i in range(2)]
    engine.step()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.pool, "clear_block", broken)
    engine.shutdown()
    assert [info_of(list(stream)).stop_reason for stream in streams] == ["cancelled"] * 2
    assert engine._stopped.is_set()


def test_an_id_is_free_again_when_its_info_arrives(folder: Path) -> None:
    engine = _engine(load_tiny(folder))
    for _ in range(2):
        (events,) = _finish(engine, *engine.generate(ask("same", PROMPT[:5], max_tokens=2)))
        assert len(tokens_of(events)) == 2
    engine.shutdown()


def test_a_chunk_beside_streams_is_sized_by_what_a_token_of_the_last_one_took(
    folder: Path,
) -> None:
    engine = _engine(load_tiny(folder), prefill_chunk_tokens=512, latency_budget_ms=100)
    prefill, counts = engine._runner.prefill, list[int]()

    def counted(span: RowSpan) -> None:
        counts.append(span.count)
        prefill(span)

    engine._runner.prefill = counted  # type: ignore[method-assign]
    (running,) = engine.generate(ask("running", PROMPT[:3], max_tokens=90))
    engine.step()
    assert engine.scheduler.active[0].phase is Phase.DECODE
    learn = engine.scheduler.learn_chunk_time
    learn(100, 0.09, is_joint=False)
    (beside,) = engine.generate(ask("beside", PROMPT[::-1], max_tokens=1))
    engine.step()
    assert counts.pop() == 96  # of the 111 that fit
    _finish(engine, beside)
    for count, took_s, is_joint, expected in (
        (512, 0.01, False, 512),
        (300, 0.36, False, 80),
        (10, 5.0, False, 80),  # too few to say what a token takes
        (64, 5.0, False, 64),
        (64, 5.0, True, 32),
        (32, 0.05, True, 64),
    ):
        learn(count, took_s, is_joint=is_joint)
        assert engine.scheduler._shared_chunk == expected
    running.close()
    engine.step()
    engine.shutdown()
