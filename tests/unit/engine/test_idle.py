"""Claims about what an engine does with time: it forgets what nobody has used for too long, and
gives its prefixes up in a light sleep, of itself and on its own thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from osaurus.engine.core import BatchEngine
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny

PROMPT = list(range(3, 83))


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    layers: dict[str, Any] = {}
    if request.param == "lfm2":
        layers["layer_types"] = ["conv", "full_attention", "conv"]
    save_tiny(path, request.param, **layers)
    return path


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _engine(
    folder: Path, *, cache: dict[str, Any], start: bool = False, **more: Any
) -> BatchEngine:
    clock = more.pop("clock", time.monotonic)
    return BatchEngine(
        load_tiny(folder),
        EngineConfig(
            kv_block_tokens=16,
            cache=CacheConfig(snapshot_interval=16, **cache),
            **more,
        ),
        token_bytes=TokenText().token_bytes,
        clock=clock,
        start=start,
    )


def _ask(engine: BatchEngine, prompt: list[int] = PROMPT) -> int:
    """One request by hand; how much of it was reused."""
    (stream,) = engine.generate(ask("r", prompt, max_tokens=2))
    while not stream._mailbox.completed:  # type: ignore[attr-defined]
        engine.step()
    engine.check()
    return info_of(list(stream)).cached_prompt_tokens


@pytest.fixture
def aging(folder: Path, clock: Clock) -> Iterator[BatchEngine]:
    engine = _engine(folder, cache={"prefix_ttl_s": 60}, clock=clock)
    yield engine
    engine.shutdown()


def test_a_prefix_lasts_from_its_last_use(aging: BatchEngine, clock: Clock) -> None:
    assert _ask(aging) == 0
    clock.now += 50
    assert _ask(aging) > 0
    clock.now += 50  # a hundred after the first use, fifty after the last
    assert _ask(aging) > 0
    clock.now += 60
    aging.step()
    assert aging.pool.cached_bytes == 0
    assert len(aging.states.snapshots) == 0
    assert _ask(aging) == 0


def test_without_a_time_a_prefix_stays(folder: Path, clock: Clock) -> None:
    engine = _engine(folder, cache={}, clock=clock)
    _ask(engine)
    clock.now += 1e9
    assert _ask(engine) > 0
    engine.shutdown()


def test_an_engine_that_nobody_asks_forgets_by_itself(folder: Path) -> None:
    for settings in ({"cache": {"prefix_ttl_s": 0.3}}, {"cache": {}, "light_sleep_s": 0.3}):
        engine = _engine(folder, start=True, **settings)
        (stream,) = engine.generate(ask("r", PROMPT, max_tokens=2))
        list(stream)
        deadline = time.monotonic() + 20
        while engine.cache_stats().cached_bytes or engine.cache_stats().snapshots:
            assert time.monotonic() < deadline, "it kept what it should have given up"
            time.sleep(0.02)
        # And it rests, once the step that forgot is over and counted.
        steps = -1
        while steps != engine.stats.steps:
            assert time.monotonic() < deadline, "it goes on though nothing is left to do"
            steps = engine.stats.steps
            time.sleep(0.2)
        (stream,) = engine.generate(ask("r", PROMPT, max_tokens=2))
        assert info_of(list(stream)).generated_tokens == 2
        engine.shutdown()


def test_light_sleep_counts_from_the_last_work(folder: Path, clock: Clock) -> None:
    engine = _engine(folder, cache={}, light_sleep_s=100, clock=clock)
    _ask(engine)
    assert engine._idle.due_in() == 100  # type: ignore[attr-defined]
    clock.now += 99
    assert _ask(engine) > 0
    assert engine._idle.due_in() == 100  # type: ignore[attr-defined]
    clock.now += 100
    engine.step()
    assert engine.pool.cached_bytes == 0
    assert engine._idle.due_in() is None  # type: ignore[attr-defined]
    engine.shutdown()


def test_as_many_requests_decode_in_one_forward_as_the_setting_says(folder: Path) -> None:
    rows: list[int] = []
    answers: list[list[list[Any]]] = []
    for size in (None, 2):
        engine = _engine(folder, cache={}, decode_batch_size=size)
        original = engine._runner.decode  # type: ignore[attr-defined]

        def decode(spans: Any, original: Any = original) -> Any:
            rows.append(len(spans))
            return original(spans)

        engine._runner.decode = decode  # type: ignore[method-assign]
        streams = [engine.generate(ask(f"r{i}", PROMPT[i:], max_tokens=6))[0] for i in range(5)]
        rows.clear()
        while not all(stream._mailbox.completed for stream in streams):  # type: ignore[attr-defined]
            engine.step()
        answers.append([[str(e) for e in s if hasattr(e, "text")] for s in streams])
        assert max(rows) == (5 if size is None else 2)
        engine.shutdown()
    assert answers[0] == answers[1]


def test_as_many_prompts_take_turns_as_the_setting_says(folder: Path) -> None:
    orders = {}
    for size in (None, 1):
        engine = _engine(folder, cache={}, prefill_batch_size=size, prefill_chunk_tokens=16)
        streams = [engine.generate(ask(f"r{i}", PROMPT[i:], max_tokens=1)) for i in range(2)]
        order: list[str] = []
        original = engine._runner.prefill  # type: ignore[attr-defined]

        def prefill(span: Any, original: Any = original, order: list[str] = order) -> Any:
            order.append(span.request.request_id)
            return original(span)

        engine._runner.prefill = prefill  # type: ignore[method-assign]
        for _ in range(20):
            engine.step()
        assert all(stream._mailbox.completed for (stream,) in streams)  # type: ignore[attr-defined]
        orders[size] = order
        engine.shutdown()
    assert orders[None][:4] == ["r0", "r1", "r0", "r1"]
    assert orders[1] == sorted(orders[1])
    assert set(orders[1]) == {"r0", "r1"}
