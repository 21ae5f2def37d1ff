"""Claims: state that a prompt passed without keeping it is computed when nobody waits, given
up when somebody does, and never for media or where the settings say no."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osaurus.engine.core import BatchEngine
from osaurus.types.cache import CacheConfig, CacheHints
from osaurus.types.engine import EngineConfig
from synthetic import build
from tiny import TokenText, ask, info_of, tokens_of

SYSTEM, FAMILIES = list(range(3, 48)), ("gated_delta", "state_space", "pool")
each_family = pytest.mark.parametrize("family", FAMILIES)


def _engine(family: str, **cache: Any) -> BatchEngine:
    identity = "synthetic@1" if "disk_dir" in cache else None
    return BatchEngine(
        build(family),
        EngineConfig(
            kv_block_tokens=8, prefill_chunk_tokens=16, max_batch_size=2, cache=CacheConfig(**cache)
        ),
        token_bytes=TokenText().token_bytes,
        identity=identity,
        start=False,
    )


def _prompt(user: int, count: int = 40) -> list[int]:
    return [*SYSTEM, *((user * n) % 50 + 3 for n in range(count))]


def _say(engine: BatchEngine, prompt: list[int], stable: int = 0, **hints: Any) -> Any:
    asked = ask("r", prompt, max_tokens=6)
    (stream,) = engine.generate(replace(asked, cache=CacheHints(stable_tokens=stable, **hints)))
    while not stream._mailbox.completed:  # type: ignore[attr-defined]
        engine.step()
        engine.check()
    return list(stream)


def _idle(engine: BatchEngine) -> None:
    for _ in range(40):
        engine.step()
        engine.check()


def _passed(engine: BatchEngine) -> None:
    """Pass the end of the stable part on a prefix that was kept for a longer prompt."""
    _say(engine, _prompt(5))
    events = _say(engine, _prompt(5), stable=len(SYSTEM))
    assert info_of(events).cached_prompt_tokens > len(SYSTEM)


@each_family
def test_the_stable_parts_state_is_there_for_the_next_prompt(family: str) -> None:
    engine = _engine(family)
    _passed(engine)
    before = engine.stats
    _idle(engine)
    assert engine.stats.rederived_tokens == 40
    assert engine.stats.prefill_tokens == before.prefill_tokens
    assert engine.stats.finished_requests == before.finished_requests
    assert engine.cache_stats().lookups == 2
    events = _say(engine, _prompt(7), stable=len(SYSTEM))
    assert info_of(events).cached_prompt_tokens == 40
    cold = _engine(family, use_paged_cache="off")
    assert tokens_of(events) == tokens_of(_say(cold, _prompt(7)))
    _idle(engine)
    assert engine.stats.rederived_tokens == 40, "once is enough"
    for each in (cold, engine):
        each.shutdown()
        each.check()
    assert engine.pool.used_bytes == 0
    assert engine.states.slots.num_held == 0


def test_a_request_that_comes_puts_an_end_to_it() -> None:
    engine = _engine("gated_delta")
    _passed(engine)
    while not engine.scheduler.active:
        engine.step()
    assert engine.scheduler.active[0].is_replay
    assert engine.capacity_snapshot().active_count == 0
    fed = engine.stats.rederived_tokens
    _say(engine, _prompt(9))
    assert engine.stats.rederived_tokens == fed
    assert not engine.scheduler.active
    engine.shutdown()


def test_a_full_batch_is_no_obstacle() -> None:
    engine = _engine("gated_delta")
    engine.update_max_batch_size(1)
    _passed(engine)
    while not engine.scheduler.active:
        engine.step()
    assert info_of(_say(engine, _prompt(9))).generated_tokens == 6
    engine.shutdown()


def test_it_can_be_switched_off() -> None:
    engine = _engine("gated_delta", rederive=False)
    _passed(engine)
    _idle(engine)
    assert engine.stats.rederived_tokens == 0
    engine.shutdown()


def test_media_are_never_computed_from_their_tokens() -> None:
    engine = _engine("gated_delta")
    _say(engine, _prompt(5), media_salt=b"x")
    _say(engine, _prompt(5), stable=len(SYSTEM), media_salt=b"x")
    _idle(engine)
    assert engine.stats.rederived_tokens == 0
    engine.shutdown()


def test_attention_alone_has_nothing_to_compute_again() -> None:
    engine = _engine("full")
    _passed(engine)
    assert not engine._has_work()
    engine.shutdown()


def test_an_engine_on_its_thread_does_it_by_itself_and_shuts_down_in_the_middle(
    tmp_path: Path,
) -> None:
    engine = BatchEngine(
        build("gated_delta"),
        EngineConfig(kv_block_tokens=8, prefill_chunk_tokens=16),
        token_bytes=TokenText().token_bytes,
    )
    for stable in (0, len(SYSTEM)):
        asked = replace(ask("r", _prompt(5)), cache=CacheHints(stable_tokens=stable))
        (stream,) = engine.generate(asked)
        assert info_of(list(stream)).error is None
    engine.shutdown()
    engine.check()
    assert engine.pool.used_bytes == 0


def test_what_was_computed_again_is_kept_on_disk(tmp_path: Path) -> None:
    engine = _engine("gated_delta", disk_dir=tmp_path)
    _passed(engine)
    _idle(engine)
    engine.shutdown()
    engine = _engine("gated_delta", disk_dir=tmp_path)
    events = _say(engine, _prompt(7), stable=len(SYSTEM))
    assert (info_of(events).cache_detail, info_of(events).cached_prompt_tokens) == ("disk", 40)
    _idle(engine)
    assert engine.stats.rederived_tokens == 0
    engine.shutdown()
