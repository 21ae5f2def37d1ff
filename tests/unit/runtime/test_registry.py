"""Engines: one a model, at the size that holds, another when one has died, counts that stay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from api.scripted_engine import ScriptedEngine
from osaurus.errors import EngineShutdown, InvalidMaxBatchSize
from osaurus.runtime.registry import EngineRegistry
from osaurus.types.cache import CacheStats


class Maker:
    """Counts what it makes; `born_dead` engines come first."""

    def __init__(self, born_dead: int = 0) -> None:
        self.made: list[ScriptedEngine] = []
        self._born_dead = born_dead

    def __call__(self, max_batch_size: int) -> ScriptedEngine:
        engine = ScriptedEngine()
        engine.max_batch_size = max_batch_size
        self.made.append(engine)
        if len(self.made) <= self._born_dead:
            engine.fail("it would not start")
        return engine


def _run(scenario: Callable[[EngineRegistry], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario(EngineRegistry())

    asyncio.run(bounded())


def test_five_first_callers_cause_one_engine() -> None:
    async def scenario(registry: EngineRegistry) -> None:
        make = Maker()
        engines = await asyncio.gather(*(registry.engine("m", make, 4) for _ in range(5)))
        assert make.made == [engines[0]]
        assert set(map(id, engines)) == {id(engines[0])}

    _run(scenario)


def test_another_size_reaches_the_engine_that_runs() -> None:
    async def scenario(registry: EngineRegistry) -> None:
        make = Maker()
        first = await registry.engine("m", make, 4)
        assert await registry.engine("m", make, 9) is first
        capacity = registry.capacity_snapshot("m")
        assert capacity is not None
        assert capacity.configured_maximum == 9

    _run(scenario)


def test_an_engine_that_refuses_a_size_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(registry: EngineRegistry) -> None:
        make = Maker()
        engine = await registry.engine("m", make, 4)

        def refuse(n: int) -> None:
            raise InvalidMaxBatchSize(n)

        monkeypatch.setattr(engine, "update_max_batch_size", refuse)
        assert await registry.engine("m", make, 0) is engine
        assert make.made == [engine]

    _run(scenario)


def test_a_dead_engine_is_replaced_at_the_size_that_was_asked_for() -> None:
    async def scenario(registry: EngineRegistry) -> None:
        make = Maker()
        first = await registry.engine("m", make, 4)
        make.made[0].fail("CUDA error: an illegal memory access was encountered")
        second, third = await asyncio.gather(
            registry.engine("m", make, 2), registry.engine("m", make, 2)
        )
        assert second is third
        assert second is not first
        assert [engine.max_batch_size for engine in make.made] == [4, 2]
        assert registry.last_error is not None
        assert "illegal memory access" in registry.last_error
        assert (registry.retired.num_retired, registry.retired.num_failed) == (1, 1)

    _run(scenario)


def test_engines_that_die_as_they_are_built_are_given_up_on() -> None:
    async def scenario(registry: EngineRegistry) -> None:
        make = Maker(born_dead=2)
        assert await registry.engine("m", make, 4) is make.made[2]
        await registry.shutdown_all()
        make = Maker(born_dead=99)
        with pytest.raises(EngineShutdown, match="3 engines in a row"):
            await registry.engine("m", make, 4)
        assert len(make.made) == 3

    _run(scenario)


def test_a_caller_that_meets_a_teardown_waits_and_gets_another_engine() -> None:
    async def scenario(registry: EngineRegistry) -> None:
        make = Maker()
        first = await registry.engine("m", make, 4)
        outcomes = await asyncio.gather(
            registry.shutdown_engine("m"),
            registry.shutdown_engine("m"),
            registry.engine("m", make, 4),
        )
        assert sorted(outcomes[:2]) == [False, True]
        assert outcomes[2] is not first
        assert not outcomes[2].capacity_snapshot().is_shutdown

    _run(scenario)


def test_counts_outlive_their_engines_and_are_never_counted_twice() -> None:
    async def scenario(registry: EngineRegistry) -> None:
        make = Maker()
        for lookups in (3, 4):
            engine = await registry.engine("m", make, 4)
            assert isinstance(engine, ScriptedEngine)
            engine.stats = CacheStats(lookups=lookups)
            await asyncio.gather(*(registry.shutdown_engine("m") for _ in range(3)))
        assert registry.retired_cache().lookups == 7
        assert registry.retired.num_retired == 2
        assert registry.capacities() == {}

    _run(scenario)
