"""The model pool: one load for many callers, leases that hold, failures remembered."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from api.scripted_engine import ScriptedEngine, ScriptedSource
from osaurus.errors import (
    BundleError,
    EngineShutdown,
    InsufficientResources,
    ModelNotFound,
    UnsupportedBundle,
)
from osaurus.runtime.cache_totals import CacheTotals
from osaurus.runtime.model import Listing
from osaurus.runtime.pool import ModelRuntime
from osaurus.types.cache import CacheStats
from osaurus.types.runtime import RuntimeSettings


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def _source(*names: str) -> ScriptedSource:
    return ScriptedSource({name: ScriptedEngine() for name in names or ("m",)})


def test_many_first_callers_cause_one_load() -> None:
    async def scenario() -> None:
        source = _source()
        source.gates["m"] = threading.Event()
        runtime = ModelRuntime(source)
        callers = [asyncio.create_task(runtime.acquire("m")) for _ in range(5)]
        await _until(lambda: source.loads == ["m"])
        assert runtime.loading() == ["m"]
        source.gates["m"].set()
        held = await asyncio.gather(*callers)
        assert source.loads == ["m"]
        assert len({id(one.model) for one in held}) == 1
        assert runtime.lease.count("m") == 5
        for one in held:
            one.release()
            one.release()
        assert runtime.lease.snapshot() == {}

    _run(scenario)


def test_the_loop_goes_on_while_a_model_loads() -> None:
    async def scenario() -> None:
        source = _source()
        source.gates["m"] = threading.Event()
        caller = asyncio.create_task(ModelRuntime(source).acquire("m"))
        await _until(lambda: source.loads == ["m"])
        source.gates["m"].set()  # set from the loop: it would never come if the load blocked it
        (await caller).release()

    _run(scenario)


def test_a_caller_that_leaves_does_not_stop_the_load_of_another() -> None:
    async def scenario() -> None:
        source = _source()
        source.gates["m"] = threading.Event()
        runtime = ModelRuntime(source)
        leaver, stayer = (asyncio.create_task(runtime.acquire("m")) for _ in range(2))
        await _until(lambda: source.loads == ["m"])
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        source.gates["m"].set()
        held = await stayer
        assert runtime.lease.snapshot() == {"m": 1}
        held.release()

    _run(scenario)


def test_the_counts_of_a_cache_outlive_its_model() -> None:
    async def scenario() -> None:
        source = _source("a", "b")
        source.engines["a"].stats = CacheStats(lookups=3, memory_hits=2, disk={"stores": 5})
        source.engines["b"].stats = CacheStats(lookups=1)
        runtime = ModelRuntime(source)
        for name in ("a", "b"):
            (await runtime.acquire(name)).release()
            await runtime.unload(name)
        expected = CacheTotals(lookups=4, memory_hits=2, disk_stores=5)
        assert runtime.unloaded_cache == expected

    _run(scenario)


def test_unloading_waits_for_the_lease_and_then_stops_the_engine() -> None:
    async def scenario() -> None:
        source = _source()
        engine = source.engines["m"]
        runtime = ModelRuntime(source)
        held = await runtime.acquire("m")
        unloading = asyncio.create_task(runtime.unload("m"))
        await _until(lambda: not runtime.resident())
        assert not engine.capacity_snapshot().is_shutdown
        held.release()
        assert await unloading
        assert engine.capacity_snapshot().is_shutdown

    _run(scenario)


def test_a_request_that_meets_a_draining_model_waits_and_loads_it_afresh() -> None:
    async def scenario() -> None:
        made: list[ScriptedEngine] = []

        def make(_: str) -> ScriptedEngine:
            made.append(ScriptedEngine())
            return made[-1]

        source = ScriptedSource({"m": ScriptedEngine()}, make_engine=make)
        runtime = ModelRuntime(source)
        first = await runtime.acquire("m")
        unloading = asyncio.create_task(runtime.unload("m"))
        await _until(lambda: not runtime.resident())
        second = asyncio.create_task(runtime.acquire("m"))
        await asyncio.sleep(0)
        assert not second.done()
        first.release()
        await unloading
        held = await second
        assert held.model.engine is made[1]
        assert len(made) == 2
        held.release()

    _run(scenario)


def test_two_unloads_stop_the_engine_once_and_only_one_says_it_was_there() -> None:
    async def scenario() -> None:
        runtime = ModelRuntime(_source())
        (await runtime.acquire("m")).release()
        outcomes = await asyncio.gather(runtime.unload("m"), runtime.unload("m"))
        assert sorted(outcomes) == [False, True]
        assert not await runtime.unload("m")

    _run(scenario)


def test_an_engine_that_stopped_by_itself_is_rebuilt_on_the_same_weights() -> None:
    async def scenario() -> None:
        source = ScriptedSource({"m": ScriptedEngine()}, make_engine=lambda _: ScriptedEngine())
        runtime = ModelRuntime(source)
        held = await runtime.acquire("m")
        held.model.engine.shutdown()
        held.release()
        again = await runtime.acquire("m")
        assert not again.model.engine.capacity_snapshot().is_shutdown
        assert again.model.engine is not held.model.engine
        assert source.loads == ["m"]
        again.release()

    _run(scenario)


def test_a_failed_load_is_refused_at_once_until_the_pause_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [100.0]
        source = ScriptedSource({"m": ScriptedEngine()}, path=tmp_path)
        source.failures["m"] = UnsupportedBundle("no such architecture")
        settings = RuntimeSettings(failure_pause_s=30)
        runtime = ModelRuntime(source, settings, clock=lambda: now[0])
        for _ in range(3):
            with pytest.raises(UnsupportedBundle, match="no such architecture"):
                await runtime.acquire("m")
        assert source.loads == ["m"]
        assert runtime.failures() == {"m": "no such architecture"}
        now[0] += 31
        with pytest.raises(UnsupportedBundle):
            await runtime.acquire("m")
        assert source.loads == ["m", "m"]

    _run(scenario)


def test_changed_files_end_the_pause_and_success_clears_the_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        source = ScriptedSource({"m": ScriptedEngine()}, path=tmp_path)
        source.failures["m"] = UnsupportedBundle("no tokenizer")
        runtime = ModelRuntime(source)
        with pytest.raises(UnsupportedBundle):
            await runtime.acquire("m")
        source.failures.clear()
        with pytest.raises(UnsupportedBundle):
            await runtime.acquire("m")
        (tmp_path / "tokenizer.json").write_text("{}")
        (await runtime.acquire("m")).release()
        assert runtime.failures() == {}

    _run(scenario)


def test_every_joiner_sees_the_failure_and_nothing_stays_resident() -> None:
    async def scenario() -> None:
        source = _source()
        source.failures["m"] = UnsupportedBundle("bad")
        runtime = ModelRuntime(source)
        results = await asyncio.gather(
            *(runtime.acquire("m") for _ in range(4)), return_exceptions=True
        )
        assert all(isinstance(result, UnsupportedBundle) for result in results)
        assert source.loads == ["m"]
        assert (runtime.resident(), runtime.loading(), runtime.lease.snapshot()) == ([], [], {})

    _run(scenario)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(MemoryError(), InsufficientResources), (RuntimeError("shape [3]"), BundleError)],
)
def test_what_is_no_error_of_ours_becomes_one(raised: Exception, expected: type[Exception]) -> None:
    async def scenario() -> None:
        source = _source()
        source.failures["m"] = raised
        with pytest.raises(expected, match="m "):
            await ModelRuntime(source).acquire("m")

    _run(scenario)


def test_an_unknown_name_is_not_remembered() -> None:
    async def scenario() -> None:
        runtime = ModelRuntime(_source())
        with pytest.raises(ModelNotFound):
            await runtime.acquire("absent")
        assert runtime.failures() == {}

    _run(scenario)


def test_a_name_means_what_the_settings_say_now_and_no_longer_what_it_meant() -> None:
    async def scenario() -> None:
        source = _source("a", "b")
        source.aliases = {"claude": "a"}
        runtime = ModelRuntime(source, RuntimeSettings(eviction="manual_multi_model"))
        (await runtime.acquire("claude")).release()
        source.aliases = {"claude": "b"}
        runtime.apply(runtime.settings)
        with await runtime.acquire("claude") as model:
            assert model.model_id == "b"
        assert source.loads == ["a", "b"]
        await runtime.shut_down()

    _run(scenario)


def test_what_prompts_are_made_with_is_had_without_a_load_and_beside_one() -> None:
    async def scenario() -> None:
        source = _source("a")
        runtime = ModelRuntime(source)
        assert (await runtime.read("a")).model_id == "a"
        assert source.loads == []
        source.gates["a"] = threading.Event()
        loading = asyncio.create_task(runtime.acquire("a"))
        await _until(lambda: source.loads == ["a"])
        assert (await runtime.read("a")).tokenizer is source.tokenizer
        source.gates["a"].set()
        held = await loading
        assert await runtime.read("a") is held.model
        held.release()
        with pytest.raises(ModelNotFound):
            await runtime.read("b")
        await runtime.shut_down()

    _run(scenario)


def test_aliases_share_one_resident_model() -> None:
    async def scenario() -> None:
        source = _source("org/m", "b")
        source.aliases = {"m": "org/m", "default": "org/m"}
        runtime = ModelRuntime(source, RuntimeSettings(eviction="manual_multi_model"))
        for name in ("m", "default", "org/m", "m"):
            (await runtime.acquire(name)).release()
        (await runtime.acquire("b")).release()
        assert source.loads == ["org/m", "b"]
        assert runtime.current == "b"
        assert [row.model.model_id for row in runtime.resident()] == ["b", "org/m"]
        await runtime.unload("default")
        assert [row.model.model_id for row in runtime.resident()] == ["b"]

    _run(scenario)


def test_shutting_down_stops_engines_refuses_requests_and_may_be_done_twice() -> None:
    async def scenario() -> None:
        source = _source()
        runtime = ModelRuntime(source)
        (await runtime.acquire("m")).release()
        await runtime.shut_down()
        await runtime.shut_down()
        assert source.engines["m"].capacity_snapshot().is_shutdown
        with pytest.raises(EngineShutdown):
            await runtime.acquire("m")

    _run(scenario)


def test_shutting_down_does_not_wait_for_a_load_and_stops_what_it_made() -> None:
    async def scenario() -> None:
        source = _source()
        source.gates["m"] = threading.Event()
        runtime = ModelRuntime(source)
        caller = asyncio.create_task(runtime.acquire("m"))
        await _until(lambda: source.loads == ["m"])
        await runtime.shut_down()
        with pytest.raises(EngineShutdown):
            await caller
        source.gates["m"].set()
        await _until(lambda: source.freed == ["m"])
        assert runtime.resident() == []

    _run(scenario)


def test_a_path_is_a_name_for_the_operator_only_until_the_model_is_resident() -> None:
    class PathSource(ScriptedSource):
        def find(self, name: str, *, allow_paths: bool) -> Listing:
            if name.startswith("/") and not allow_paths:
                raise ModelNotFound(name)
            return super().find(name.removeprefix("/"), allow_paths=allow_paths)

    async def scenario() -> None:
        runtime = ModelRuntime(PathSource({"m": ScriptedEngine()}))
        with pytest.raises(ModelNotFound):
            await runtime.acquire("/m")
        (await runtime.acquire("/m", allow_paths=True)).release()
        for name in ("/m", "m"):
            (await runtime.acquire(name)).release()
        assert [listing.model_id for listing in await runtime.catalog()] == ["m"]

    _run(scenario)


def test_shutting_down_stops_an_engine_that_was_still_draining() -> None:
    async def scenario() -> None:
        source = _source()
        runtime = ModelRuntime(source)
        held = await runtime.acquire("m")
        unloading = asyncio.create_task(runtime.unload("m"))
        await _until(lambda: not runtime.resident())
        stopping = asyncio.create_task(runtime.shut_down())
        await _until(lambda: source.engines["m"].capacity_snapshot().is_shutdown)
        held.release()
        await asyncio.gather(unloading, stopping)

    _run(scenario)
