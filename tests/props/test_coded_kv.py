"""Claim: with compressed keys and values a request has the tokens it has alone, whatever runs
beside it, after a preemption and after a prefix hit, and the pool counts every block."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osaurus.engine.core import BatchEngine
from osaurus.models.base import Model
from osaurus.types.cache import CacheConfig, CacheHints, KVMode
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

MODES = ("turbo(3,3)", "turbo(4,4)", "affine(8,32)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("full")
    save_tiny(path, "llama", head_dim=32)
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    save_tiny(
        path,
        "qwen2",
        head_dim=32,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    )
    return path


def engine_of(model: Model, mode: str, **settings: Any) -> BatchEngine:
    given: dict[str, Any] = {"kv_block_tokens": 16, "prefill_chunk_tokens": 48, **settings}
    cache = CacheConfig(kv_mode=KVMode.parse(mode), disk_dir=given.pop("disk_dir", None))
    return BatchEngine(
        model,
        EngineConfig(**given, cache=cache),
        token_bytes=TokenText().token_bytes,
        identity="tiny@1",
        start=False,
    )


def drain(engine: BatchEngine, streams: list[Any]) -> None:
    while not all(stream._mailbox.completed for stream in streams):
        engine.step()
        engine.check()


def answer(engine: BatchEngine, prompt: list[int], count: int = 60) -> tuple[list[int], Any]:
    (stream,) = engine.generate(ask("r", prompt, max_tokens=count))
    drain(engine, [stream])
    events = list(stream)
    return tokens_of(events), info_of(events)


def alone(model: Model, mode: str, prompt: list[int], count: int = 60) -> list[int]:
    engine = engine_of(model, mode)
    tokens, info = answer(engine, prompt, count)
    assert info.error is None
    engine.shutdown()
    return tokens


PROMPTS = [[random.Random(i).randrange(3, 300) for _ in range(n)] for i, n in enumerate((200, 77))]


@pytest.mark.parametrize("mode", MODES)
def test_company_changes_nothing(folder: Path, mode: str) -> None:
    model = load_tiny(folder)
    expected = [alone(model, mode, prompt) for prompt in PROMPTS]
    engine = engine_of(model, mode)
    streams = [engine.generate(ask(f"r{i}", p, max_tokens=60))[0] for i, p in enumerate(PROMPTS)]
    for _ in range(20):
        engine.step()
    assert engine.cache_stats().coded_blocks > 0
    streams += engine.generate(ask("late", PROMPTS[1], n=2, max_tokens=60))
    drain(engine, streams)
    got = [tokens_of(list(stream)) for stream in streams]
    assert got == [*expected, expected[1], expected[1]]
    assert engine.cache_stats().coded_bytes == 0
    assert engine.pool.used_bytes == 0
    engine.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_a_preempted_request_goes_on_with_the_same_tokens(folder: Path, mode: str) -> None:
    model = load_tiny(folder)
    expected = alone(model, mode, PROMPTS[0], 90)
    engine = engine_of(model, mode)
    (stream,) = engine.generate(ask("r", PROMPTS[0], max_tokens=90))
    turns = random.Random(mode).sample(range(8, 80), 3)
    for turn in range(1000):
        engine.step()
        engine.check()
        if turn in turns and engine.scheduler.active:
            engine.scheduler.preempt(engine.scheduler.active[0])
        if stream._mailbox.completed:
            break
    assert tokens_of(list(stream)) == expected
    engine.shutdown()


def test_a_tight_pool_preempts_and_answers_the_same(folder: Path) -> None:
    model, mode = load_tiny(folder), "turbo(3,3)"
    expected = [alone(model, mode, prompt) for prompt in PROMPTS]
    probe = engine_of(model, mode)
    budget = 20 * sum(probe.pool.block_bytes)
    probe.shutdown()
    engine = engine_of(model, mode, kv_budget_bytes=budget, max_context_tokens=300)
    streams = [engine.generate(ask(f"r{i}", p, max_tokens=60))[0] for i, p in enumerate(PROMPTS)]
    drain(engine, streams)
    assert [tokens_of(list(stream)) for stream in streams] == expected
    engine.shutdown()


def test_a_hit_restores_exact_blocks(folder: Path, tmp_path: Path) -> None:
    """The raw prompt leaves memory when it is coded; the disk has it."""
    model, mode = load_tiny(folder), "turbo(3,3)"
    expected = alone(model, mode, PROMPTS[0])
    engine = engine_of(model, mode, disk_dir=tmp_path)
    first, _ = answer(engine, PROMPTS[0])
    while engine.cache.has_work:
        engine.step()
    again, info = answer(engine, PROMPTS[0])
    assert first == again == expected
    assert info.cache_detail == "disk"
    assert info.cached_prompt_tokens == 192
    engine.shutdown()
    engine = engine_of(model, mode, disk_dir=tmp_path)
    after, info = answer(engine, PROMPTS[0])
    assert (after, info.cached_prompt_tokens) == (expected, 192)
    engine.shutdown()


def test_a_request_may_ask_for_exact_blocks(folder: Path) -> None:
    model = load_tiny(folder)
    expected = alone(model, "none", PROMPTS[0])
    engine = engine_of(model, "turbo(3,3)")
    request = replace(ask("r", PROMPTS[0], max_tokens=60), cache=CacheHints(kv_mode=KVMode("none")))
    streams = [engine.generate(request)[0], engine.generate(ask("o", PROMPTS[1]))[0]]
    drain(engine, streams)
    assert tokens_of(list(streams[0])) == expected
    engine.shutdown()


def test_layers_that_are_not_eligible_stay_exact(mixed: Path) -> None:
    model = load_tiny(mixed)
    engine = engine_of(model, "turbo(3,3)")
    stats = engine.cache_stats()
    assert stats.exact_reasons["full_attention"] == ""
    assert "sliding-window" in stats.exact_reasons["sliding_window"]
    expected = alone(model, "turbo(3,3)", PROMPTS[0])
    streams = [engine.generate(ask(f"r{i}", PROMPTS[0], max_tokens=60))[0] for i in range(2)]
    drain(engine, streams)
    assert [tokens_of(list(stream)) for stream in streams] == [expected] * 2
    engine.shutdown()


def test_live_bytes_shrink_by_what_the_codec_saves(folder: Path) -> None:
    engine = engine_of(load_tiny(folder), "turbo(3,3)")
    prompt = [3 + i % 250 for i in range(400)]
    (stream,) = engine.generate(ask("r", prompt, max_tokens=20))
    while not engine.cache_stats().coded_blocks:
        engine.step()
    for _ in range(5):
        engine.step()
    table, size = engine.scheduler.active[0].tables[0], engine.pool.block_bytes[0]
    coded = engine.pool.coded[0]
    assert coded is not None
    exact = sum(block >= 0 for block in table.blocks)
    assert exact == 1 + 5  # the sinks' block, and the newest 64 tokens with the open block
    held = exact * size + (len(table.blocks) - exact) * coded.block_bytes
    assert engine.pool.used_bytes == held < 0.5 * len(table.blocks) * size
    stream.close()
    engine.step()
    engine.shutdown()
