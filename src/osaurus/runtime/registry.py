"""The engines of the resident models: one each, rebuilt when one has stopped by itself.

In: a model's id, what builds its engine, the batch size that holds now. Out: an engine that
accepts requests. Its weights belong to the model and outlive it, so that a rebuild takes no load.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from osaurus.errors import EngineShutdown
from osaurus.runtime.blocking import on_thread
from osaurus.runtime.cache_totals import CacheTotals
from osaurus.runtime.single_flight import SingleFlight
from osaurus.types.engine import CapacitySnapshot, Engine

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Engines that are built in a row for one caller before it is told that none stays up.
_MAX_TRIES = 3


class RunBlocking(Protocol):
    """Runs a blocking call beside the loop; `runtime.blocking.on_thread` in earnest."""

    def __call__(self, function: Callable[[], _T], /) -> Awaitable[_T]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredEngines:
    """What engines did that are gone. Never falls, counts nothing twice."""

    cache: CacheTotals = field(default_factory=CacheTotals)
    num_retired: int = 0
    num_failed: int = 0
    active_high_watermark: int = 0


class EngineRegistry:
    """One event loop owns it; building and shutting down run on threads."""

    def __init__(self, run: RunBlocking = on_thread) -> None:
        self.retired = RetiredEngines()
        self.last_error: str | None = None  #: why the engine stopped that failed last
        self._run = run
        self._engines = SingleFlight[Engine]()
        self._retiring: list[Engine] = []

    async def engine(self, name: str, make: Callable[[int], Engine], max_batch_size: int) -> Engine:
        """The model's engine at that size, built by `make` when there is none that runs.
        Raises what `make` raised, or `EngineShutdown` when engines die as they are built."""
        for _ in range(_MAX_TRIES):
            engine = await self._engines.value(
                name, lambda: self._run(partial(make, max_batch_size))
            )
            capacity = engine.capacity_snapshot()
            if not capacity.is_shutdown and capacity.configured_maximum != max_batch_size:
                self._resize(name, engine, max_batch_size)
                capacity = engine.capacity_snapshot()
            if not capacity.is_shutdown:
                return engine
            logger.error("%s: its engine stopped by itself; building another", name)
            await self._engines.remove(name, partial(self._retire, name), expected=engine)
        raise EngineShutdown(f"{name}: {_MAX_TRIES} engines in a row stopped as they were built")

    def get(self, name: str) -> Engine | None:
        return self._engines.get(name)

    def capacity_snapshot(self, name: str) -> CapacitySnapshot | None:
        """An observation, not a reservation."""
        engine = self.get(name)
        return None if engine is None else engine.capacity_snapshot()

    def capacities(self) -> Mapping[str, CapacitySnapshot]:
        found = {name: self.capacity_snapshot(name) for name in self._engines.names()}
        return {name: one for name, one in found.items() if one is not None}

    def retired_cache(self) -> CacheTotals:
        """What the caches did of engines that are gone or going."""
        going = (CacheTotals.of(engine.cache_stats()) for engine in self._retiring)
        return sum(going, start=self.retired.cache)

    def cancel(self, request_id: str) -> bool:
        """Cancel one request, whichever engine has it; the engine goes on."""
        engines = [self.get(name) for name in self._engines.names()]
        return any(engine.cancel(request_id) for engine in engines if engine is not None)

    async def shutdown_engine(self, name: str) -> bool:
        """End the engine's streams and stop it. A caller that asks for it meanwhile waits."""
        return await self._engines.remove(name, partial(self._retire, name)) is not None

    async def shutdown_all(self) -> None:
        await self._engines.remove_all(partial(self._retire, "all engines"))

    def _resize(self, name: str, engine: Engine, max_batch_size: int) -> None:
        """An engine that refuses stays as it is, unless it has stopped."""
        try:
            engine.update_max_batch_size(max_batch_size)
        except EngineShutdown:
            pass  # seen by the caller in the snapshot that follows
        except Exception as error:  # noqa: BLE001 - the old size serves as well
            logger.warning("%s: still at its old batch size: %s", name, error)

    async def _retire(self, name: str, engine: Engine) -> None:
        failure = engine.capacity_snapshot().failure
        if failure is not None:
            self.last_error = f"{name}: {failure}"
        self._retiring.append(engine)
        try:
            await self._run(engine.shutdown)
            stats = await self._run(engine.cache_stats)
        finally:
            self._retiring.remove(engine)
        capacity = engine.capacity_snapshot()
        retired = self.retired
        self.retired = replace(
            retired,
            cache=retired.cache + CacheTotals.of(stats),
            num_retired=retired.num_retired + 1,
            num_failed=retired.num_failed + (failure is not None),
            active_high_watermark=max(
                retired.active_high_watermark, capacity.active_count_high_watermark
            ),
        )

    def check(self) -> None:
        self._engines.check()
