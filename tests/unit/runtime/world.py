"""A runtime in a world without threads and clocks, with everything that could go wrong in reach.

Each operation is one thing that may happen: a request comes, goes, is cancelled; a blocking call
ends; time passes; an engine dies; settings change. `check` holds what must be true in between.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from osaurus.errors import BundleError, EngineShutdown, LoadRefused, ModelNotFound
from osaurus.runtime.held import HeldModel
from osaurus.runtime.model import Listing, LoadedModel, ModelContainer
from osaurus.runtime.pool import ModelRuntime
from osaurus.types.cache import CacheStats
from osaurus.types.engine import CapacitySnapshot, Engine
from osaurus.types.runtime import LoadIntent, ModelUse, ResidencyPolicy, RuntimeSettings
from unit.runtime.virtual import Blocking, VirtualLoop

MODELS = ("a", "b", "c")
_ALLOWED = (BundleError, EngineShutdown, LoadRefused, ModelNotFound)


@dataclass(frozen=True)
class WorldListing:
    model_id: str
    size_bytes: int
    path: Path = Path("/nonexistent")
    modified: datetime = datetime(2026, 1, 2, tzinfo=UTC)
    is_embedder: bool = False
    context: int = 0


@dataclass(eq=False)
class WorldEngine:
    """As much of an engine as the runtime sees."""

    container: WorldContainer
    size: int
    is_shut_down: bool = False
    failure: str | None = None
    max_context_tokens: int = 100

    def capacity_snapshot(self) -> CapacitySnapshot:
        return CapacitySnapshot(
            configured_maximum=self.size,
            active_count=0,
            pending_count=0,
            active_count_high_watermark=0,
            is_accepting_requests=not self.is_shut_down,
            is_shutdown=self.is_shut_down,
            failure=self.failure,
        )

    def update_max_batch_size(self, n: int) -> None:
        if self.is_shut_down:
            raise EngineShutdown("stopped")
        self.size = n

    def cache_stats(self) -> CacheStats:
        return CacheStats(lookups=1)

    def cancel(self, request_id: str) -> bool:
        return False

    def shutdown(self) -> None:
        self.is_shut_down = True


@dataclass(eq=False)
class WorldContainer:
    model_id: str
    engines: list[WorldEngine] = field(default_factory=list)
    is_freed: bool = False

    @property
    def live_engines(self) -> list[WorldEngine]:
        return [engine for engine in self.engines if not engine.is_shut_down]


class World:
    """`faults` collects what must never happen; it is empty after every operation."""

    def __init__(self, order: random.Random | None = None) -> None:
        self.loop = VirtualLoop(order)
        self.run = Blocking()
        self.faults: list[str] = []
        self.containers: list[WorldContainer] = []
        self.sizes = {name: 10 * (i + 1) for i, name in enumerate(MODELS)}
        self.embedders: set[str] = set()  #: strict keeps one of these beside another model
        self.footprints: dict[str, int] = {}  #: beside `sizes`, of models that take more
        self.failing: set[str] = set()  #: models whose next load fails
        self.runtime = ModelRuntime(
            cast(Any, self), RuntimeSettings(), clock=self.loop.time, run=self.run
        )
        self.max_batch_size = 4
        self.memory_limit = 50  # of which 80 % hold a and b, or a and c at a pinch
        self.callers: list[asyncio.Task[HeldModel]] = []
        self.held: list[tuple[HeldModel, WorldContainer]] = []
        self.others: list[asyncio.Task[Any]] = []
        self.killed: set[WorldEngine] = set()
        self.num_acquired = 0
        self._ended_at: dict[asyncio.Task[Any], float] = {}
        self._held_since: dict[HeldModel, float] = {}

    # The source of models.

    def find(self, name: str, *, allow_paths: bool = False) -> Listing:
        if name not in self.sizes:
            raise ModelNotFound(name)
        return WorldListing(name, self.sizes[name], is_embedder=name in self.embedders)

    def memory_bytes(self) -> int:
        return self.memory_limit

    def footprint(self, listing: Listing) -> int:
        return self.footprints.get(listing.model_id, listing.size_bytes)

    def load(self, listing: Listing) -> ModelContainer:
        name = listing.model_id
        if name in self.failing:
            self.failing.discard(name)
            raise BundleError(f"{name} is broken")
        live = [c for c in self.containers if not c.is_freed]
        self._expect(all(c.model_id != name for c in live), f"two containers of {name}")
        if self.runtime.settings.eviction == "strict_single_model" and not self._changed_policy:
            is_embedder = name in self.embedders
            like = [c.model_id for c in live if (c.model_id in self.embedders) == is_embedder]
            self._expect(not like, f"{name} is loaded beside {like}")
        container = WorldContainer(name)
        self.containers.append(container)
        return ModelContainer(
            model_id=name,
            size_bytes=self.sizes[name],
            is_embedder=name in self.embedders,
            make_engine=lambda size: self._make_engine(container, size),
            face=self._face(container),
            free=lambda: self._free(container),
            working_set_bytes=self.footprint(listing),
        )

    _changed_policy = False

    def _face(self, container: WorldContainer) -> Any:
        def face(engine: Engine) -> LoadedModel:
            model = object.__new__(LoadedModel)
            object.__setattr__(model, "model_id", container.model_id)
            object.__setattr__(model, "engine", engine)
            return model

        return face

    def _make_engine(self, container: WorldContainer, size: int) -> Any:
        self._expect(not container.live_engines, f"two engines of {container.model_id}")
        self._expect(not container.is_freed, f"an engine on freed weights of {container.model_id}")
        container.engines.append(WorldEngine(container, size))
        return container.engines[-1]

    def _free(self, container: WorldContainer) -> None:
        name = container.model_id
        self._expect(not container.is_freed, f"{name} is freed twice")
        self._expect(not container.live_engines, f"{name} is freed under its engine")
        self._expect(
            all(c is not container for _, c in self.held), f"{name} is freed during a lease"
        )
        container.is_freed = True

    def _expect(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)

    # What may happen.

    def acquire(self, name: str, intent: LoadIntent = "interactive") -> None:
        self.callers.append(self._start(self.runtime.acquire(name, use=ModelUse(intent=intent))))

    def cancel(self, index: int) -> None:
        if self.callers:
            self.callers[index % len(self.callers)].cancel()

    def release(self, index: int) -> None:
        if self.held:
            held, _ = self.held.pop(index % len(self.held))
            self._within(held.release)
            self._within(held.release)

    def end_call(self, index: int) -> None:
        if self.run.calls:
            self.run.end(index % len(self.run.calls))

    def kill_engine(self, index: int) -> None:
        live = [engine for c in self.containers for engine in c.live_engines]
        if live:
            engine = live[index % len(live)]
            engine.failure = "the device is gone"
            engine.is_shut_down = True
            self.killed.add(engine)

    def fail_next_load(self, name: str) -> None:
        self.failing.add(name)

    def unload(self, name: str) -> None:
        self.others.append(self._start(self.runtime.unload(name)))

    def unload_not_in(self, keep: Sequence[str]) -> None:
        self.others.append(self._start(self.runtime.unload_not_in(keep)))

    def clear_all(self) -> None:
        self.others.append(self._start(self.runtime.clear_all()))

    def turn(self) -> None:
        self.loop.turn()
        self._collect()

    def advance(self, seconds: float) -> None:
        self.loop.advance(seconds)
        self._collect()

    def configure(
        self, *, is_strict: bool, residency: ResidencyPolicy, capacity: int | None
    ) -> None:
        settings = RuntimeSettings(
            eviction="strict_single_model" if is_strict else "manual_multi_model",
            residency=residency,
            max_concurrent_sequences=capacity,
        )
        # A load that is under way made its room by the policy that held before.
        self._changed_policy |= settings.eviction != self.runtime.settings.eviction
        self._within(lambda: self.runtime.apply(settings))

    def check(self) -> None:
        assert not self.faults, self.faults
        assert not self.loop.errors, self.loop.errors
        self.runtime.check()
        holders = Counter(c.model_id for _, c in self.held)
        for name, count in holders.items():
            assert self.runtime.lease.count(name) >= count, f"a lease on {name} was lost"
        for held, container in self.held:
            assert not container.is_freed
            engine = cast(WorldEngine, held.model.engine)
            ended = self.loop.now - self._held_since[held] >= 300
            assert not engine.is_shut_down or engine in self.killed or ended, "a stream was ended"

    # The end.

    def quiesce(self) -> None:
        """Let everything come to its end; nothing may be left."""
        runtime = self.runtime
        while self.callers or self.others or self.held or self.run.calls or runtime.loading():
            before = (len(self.callers), len(self.others), self.loop.now)
            while self.held:
                self.release(0)
            while self.run.calls:
                self.end_call(0)
            for _ in range(10):
                self.turn()
            if not self.run.calls and not self.held:
                assert self.loop.now < 1e6, f"stuck: {before}"
                self.advance(31.0)
            self.check()
        assert self.runtime.lease.snapshot() == {}
        assert self.runtime.chats.count == 0
        assert self.runtime.loading() == []
        assert self.runtime.inflight_load_bytes == 0
        self.loop.settle()

    def close(self) -> None:
        try:
            self._end()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.settle()
            self.loop.close()

    def _end(self) -> None:
        self.quiesce()
        end = self._start(self.runtime.shut_down())
        while not end.done():
            while self.run.calls:
                self.end_call(0)
            self.turn()
        self.loop.settle()
        while self.run.calls:
            self.end_call(0)
            self.loop.settle()
        assert not [e for c in self.containers for e in c.live_engines], "an engine runs on"
        assert not asyncio.all_tasks(self.loop), "a task is left"
        self.check()

    # Help.

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        task.add_done_callback(lambda done: self._ended_at.update({done: self.loop.now}))
        return task

    def _within(self, call: Callable[[], object]) -> None:
        """On the loop, where nothing else happens at the same time."""

        async def run() -> None:
            call()

        task = self._start(run())
        while not task.done():
            self.turn()
        task.result()

    def _collect(self) -> None:
        """Take over what callers got, in the moment in which they got it."""
        for task in [t for t in self.callers if t.done()]:
            self.callers.remove(task)
            if task.cancelled():
                continue
            if (error := task.exception()) is not None:
                self._expect(isinstance(error, _ALLOWED), f"a caller saw {error!r}")
                continue
            held = task.result()
            container = cast(WorldEngine, held.model.engine).container
            self.held.append((held, container))
            self._held_since[held] = self._ended_at.get(task, self.loop.now)
            self.num_acquired += 1
        for task in [t for t in self.others if t.done()]:
            self.others.remove(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._expect(isinstance(error, _ALLOWED), f"an unload saw {error!r}")
