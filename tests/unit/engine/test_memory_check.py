"""What a request needs of the memory for keys and values, checked before anything is computed
(field case F31)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from osaurus.engine.core import BatchEngine
from osaurus.engine.memory import blocks_of_one
from osaurus.errors import ContextLengthExceeded, InsufficientResources
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

BLOCK = 16
#: 3 layers, keys and values of 2 heads of 16, float32.
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "llama")  # a context of 512 tokens
    return path


def _engine(folder: Path, tokens: int) -> BatchEngine:
    """One whose memory holds so many tokens."""
    return BatchEngine(
        load_tiny(folder),
        EngineConfig(
            kv_block_tokens=BLOCK, prefill_chunk_tokens=32, kv_budget_bytes=tokens * TOKEN_BYTES
        ),
        token_bytes=TokenText().token_bytes,
        start=False,
    )


@pytest.fixture
def engine(folder: Path) -> Iterator[BatchEngine]:
    engine = _engine(folder, 320)
    yield engine
    engine.check()
    engine.shutdown()
    assert engine.pool.used_bytes == 0


def _run(engine: BatchEngine, *streams: Any) -> list[list[Any]]:
    for _ in range(5000):
        if all(stream._mailbox.completed for stream in streams):
            break
        engine.step()
        engine.check()
    return [list(stream) for stream in streams]


def test_the_estimate_is_bytes_a_token_times_tokens(engine: BatchEngine) -> None:
    def needed(tokens: int) -> int:
        counts = blocks_of_one(engine.pool.groups, tokens, BLOCK, 32)
        return sum(n * size for n, size in zip(counts, engine.pool.block_bytes, strict=True))

    for tokens in (BLOCK, 10 * BLOCK, 30 * BLOCK):
        assert needed(tokens) == tokens * TOKEN_BYTES


def test_small_prompts_are_admitted_together_however_long_their_answers_may_be(
    folder: Path,
) -> None:
    engine = _engine(folder, 2048)
    streams = [
        engine.generate(ask(f"r{tokens}", range(3, 33), max_tokens=tokens))[0]
        for tokens in (16, 256, 8192, 32000)
    ]
    engine.step()
    assert engine.capacity_snapshot().active_count == 4
    lengths = [info_of(events).generated_tokens for events in _run(engine, *streams)]
    assert lengths == [16, 256, 482, 482]  # the context's room ends the last two
    engine.shutdown()


def test_what_can_never_fit_is_refused_with_both_figures_before_its_prefill(
    engine: BatchEngine,
) -> None:
    (running,) = engine.generate(ask("running", range(3, 33), max_tokens=40))
    for _ in range(5):
        engine.step()
    fed = engine.stats.prefill_tokens
    (refused,) = engine.generate(ask("large", [3 + i % 200 for i in range(400)], max_tokens=16))
    (events,) = _run(engine, refused)
    info = info_of(events)
    assert (info.error_code, info.generated_tokens) == ("insufficient_resources", 0)
    needed, held = re.findall(r"(\d+\.\d) MB", info.error or "")
    assert float(needed) == pytest.approx(416 * TOKEN_BYTES / 1e6, abs=0.06)
    assert float(held) == pytest.approx(320 * TOKEN_BYTES / 1e6, abs=0.06)
    assert "hold 320; " in (info.error or "")
    assert engine.stats.prefill_tokens == fed
    (events,) = _run(engine, running)
    assert len(tokens_of(events)) == 40  # the stream that ran went on


def test_a_prompt_beyond_the_models_own_context_is_told_of_that(engine: BatchEngine) -> None:
    assert engine.refusal(319) is None
    assert isinstance(engine.refusal(320), InsufficientResources)
    assert isinstance(engine.refusal(511), InsufficientResources)
    for tokens, limit in ((512, 511), (600, 512)):
        refusal = engine.refusal(tokens)
        assert isinstance(refusal, ContextLengthExceeded)
        assert refusal.max_tokens == limit


def test_what_fits_later_waits_and_streams_that_run_go_on(engine: BatchEngine) -> None:
    (first,) = engine.generate(ask("first", range(3, 203), max_tokens=60))
    (second,) = engine.generate(ask("second", range(4, 204), max_tokens=60))
    for _ in range(20):
        engine.step()
    snapshot = engine.capacity_snapshot()
    assert (snapshot.active_count, snapshot.pending_count) == (1, 1)
    for events in _run(engine, first, second):
        assert info_of(events).stop_reason == "length"
        assert len(tokens_of(events)) == 60
