"""Claim: what goes wrong around the cache is counted, and costs neither an answer nor another
request's time; and its numbers add up whatever requests do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.engine.core import BatchEngine
from osaurus.models.base import ForwardBatch, ForwardOutput, Model
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

PROMPT = [3 + (11 * i) % 290 for i in range(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "mistral", head_dim=16, sliding_window=9)
    return path


def engine_of(model: Model, disk_dir: Path | None = None, **settings: Any) -> BatchEngine:
    return BatchEngine(
        model,
        EngineConfig(kv_block_tokens=8, cache=CacheConfig(disk_dir=disk_dir), **settings),
        token_bytes=TokenText().token_bytes,
        identity="tiny@1",
        start=False,
    )


def drain(engine: BatchEngine, *streams: Any) -> list[Any]:
    while not all(stream._mailbox.completed for stream in streams):
        engine.step()
        engine.check()
    return [list(stream) for stream in streams]


def ask_once(engine: BatchEngine, prompt: list[int], count: int = 4) -> Any:
    (events,) = drain(engine, *engine.generate(ask("r", prompt, max_tokens=count)))
    return events


class _OneBadToken:
    """A window model whose prefill once writes a value that is not finite, far from the end."""

    def __init__(self, folder: Path) -> None:
        self.inner, self.armed = load_tiny(folder), True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: ForwardBatch, kv: Any) -> ForwardOutput:
        output = self.inner.forward(batch, kv)
        if self.armed and batch.num_small == 0:
            self.armed = False
            slot = int(batch.slot_mapping[kv[0].group][36])
            kv[0].storage[slot // 8, :, slot % 8] = float("nan")
        return output


def test_a_bad_value_beyond_the_window_is_read_once_and_never_again(
    folder: Path, tmp_path: Path
) -> None:
    engine = engine_of(_OneBadToken(folder), tmp_path)  # type: ignore[arg-type]
    assert info_of(ask_once(engine, PROMPT)).error is None
    while engine.cache.has_work:
        engine.step()
    assert info_of(ask_once(engine, PROMPT[:42])).error_code == "non_finite_logits"
    for _ in range(3):
        if info_of(ask_once(engine, PROMPT[:42])).error is None:
            break
    assert info_of(ask_once(engine, PROMPT[:42])).error is None
    engine.shutdown()
    engine = engine_of(load_tiny(folder), tmp_path)
    assert info_of(ask_once(engine, PROMPT[:42])).error is None
    assert all(bool(torch.isfinite(storage).all()) for storage in engine.pool.storage)
    engine.shutdown()


def test_a_store_that_raises_is_counted_and_ends_nobody(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(load_tiny(folder), tmp_path)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory for a copy")

    monkeypatch.setattr(engine.pool, "read_blocks", fail)
    expected = tokens_of(ask_once(engine, PROMPT))
    assert len(expected) == 4
    while engine.cache.has_work:
        engine.step()
    assert engine.cache_stats().store_failures > 0
    assert engine.pool.used_bytes == 0
    assert tokens_of(ask_once(engine, PROMPT)) == expected
    engine.shutdown()


def test_a_slow_disk_holds_up_nobody_but_who_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(load_tiny(folder), tmp_path)
    expected = tokens_of(ask_once(engine, PROMPT))
    while engine.cache.has_work:
        engine.step()
    disk = engine.cache.disk
    assert disk is not None
    assert disk.flush(10)
    engine.cache.index.clear()
    go_on, load = threading.Event(), disk.load
    monkeypatch.setattr(disk, "load", lambda key: go_on.wait(10) and load(key))
    (reader,) = engine.generate(ask("reader", PROMPT, max_tokens=4))
    (other,) = engine.generate(ask("other", PROMPT[7:40], max_tokens=12))
    drain(engine, other)
    assert not reader._mailbox.completed  # type: ignore[attr-defined]
    go_on.set()
    (events,) = drain(engine, reader)
    assert tokens_of(events) == expected
    assert info_of(events).cache_detail == "disk"
    engine.shutdown()


def test_clearing_does_not_wait_for_the_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(load_tiny(folder), tmp_path)
    disk = engine.cache.disk
    assert disk is not None
    go_on, started = threading.Event(), threading.Event()
    store = disk._writer._store

    def slow(record: Any) -> None:
        started.set()
        go_on.wait(10)
        store(record)

    monkeypatch.setattr(disk._writer, "_store", slow)
    ask_once(engine, PROMPT)
    while engine.cache.has_work:
        engine.step()
    assert started.wait(10)
    engine.clear_cache()
    assert info_of(ask_once(engine, PROMPT)).cached_prompt_tokens == 0
    go_on.set()
    engine.shutdown()


def test_what_waits_for_the_writer_is_bounded_and_distinct(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(load_tiny(folder), tmp_path)
    assert engine.cache.disk is not None
    monkeypatch.setattr(engine.cache.disk, "has_room", lambda nbytes: False)
    for turn in range(60):
        ask_once(engine, PROMPT)
        ask_once(engine, [5 + turn, *PROMPT])
    assert engine.pool.used_bytes <= 0.26 * engine.pool.budget_bytes
    assert engine.cache_stats().stores_dropped > 0
    monkeypatch.undo()
    engine.shutdown()


def test_counters_add_up_over_preemptions_and_forks(folder: Path) -> None:
    engine = engine_of(load_tiny(folder))
    for turn in range(6):
        streams = [
            *engine.generate(ask(f"a{turn}", PROMPT, n=2, max_tokens=20)),
            *engine.generate(ask(f"b{turn}", PROMPT[:90], max_tokens=20)),
        ]
        for step in range(12):
            engine.step()
            if step % 4 == turn % 4 and engine.scheduler.active:
                engine.scheduler.preempt(engine.scheduler.active[-1])
        for events in drain(engine, *streams):
            info = info_of(events)
            assert 0 <= info.cached_prompt_tokens < info.prompt_tokens
    stats = engine.cache_stats()
    assert stats.misses >= 0
    assert stats.memory_hits + stats.disk_hits + stats.misses == stats.lookups
    assert stats.hit_tokens <= stats.prompt_tokens
    engine.shutdown()
