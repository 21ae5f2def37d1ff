"""How models come in and go: one load for all who wait for it, room made first, memory given
back last.

Cold loads take turns in one FIFO slot. The load whose turn it is reserves its bytes, takes down
what the eviction policy says and waits until that is gone, builds the weights and a first engine,
and is published only if somebody still waits for it. Knows nothing of names and timers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from osaurus.errors import (
    BundleError,
    EngineShutdown,
    InsufficientResources,
    LoadRefused,
    OsaurusError,
)
from osaurus.runtime.eviction import victims
from osaurus.runtime.failures import LoadFailures, Stamp, stamp_of
from osaurus.runtime.held import Waiter
from osaurus.runtime.lease import ModelLease
from osaurus.runtime.model import Listing, ModelContainer, ModelSource
from osaurus.runtime.registry import EngineRegistry, RunBlocking
from osaurus.runtime.residents import Residents
from osaurus.runtime.single_flight import SingleFlight
from osaurus.types.runtime import RuntimeSettings

logger = logging.getLogger(__name__)


class _Abandoned(Exception):
    """A load that nobody waits for any more. Never leaves this module."""


class ModelLoader:
    """One event loop owns it. `on_loaded` hears of a model in the moment in which it is there,
    with each caller that waited for it; `on_leaving` when it begins to go."""

    def __init__(
        self,
        source: ModelSource,
        settings: RuntimeSettings,
        *,
        engines: EngineRegistry,
        lease: ModelLease,
        residents: Residents,
        on_loaded: Callable[[Waiter, ModelContainer], None],
        on_leaving: Callable[[str], object],
        clock: Callable[[], float],
        run: RunBlocking,
    ) -> None:
        self.settings = settings
        self.models = SingleFlight[ModelContainer](self._publish)
        self.failures = LoadFailures(clock)
        self.is_closed = False
        self._source = source
        self._engines = engines
        self._lease = lease
        self._residents = residents
        self._on_loaded = on_loaded
        self._on_leaving = on_leaving
        self._clock = clock
        self._run = run
        self._slot = asyncio.Lock()  # FIFO
        self._waiters: dict[str, list[Waiter]] = {}  # by the load they wait for
        self._reserved: dict[str, int] = {}  # bytes of loads that have begun

    @property
    def capacity(self) -> int:
        return self.settings.max_concurrent_sequences or self._source.max_batch_size

    @property
    def inflight_bytes(self) -> int:
        """Reserved for loads that are under way."""
        return sum(self._reserved.values())

    async def join(self, listing: Listing, waiter: Waiter) -> None:
        """Load the model or wait for whoever does. `waiter` has its container when the model
        came; otherwise it is worth looking again. Raises why the load failed."""
        model_id = listing.model_id
        stamp = await self._run(lambda: stamp_of(listing.path))
        if model_id not in (*self.models.names(), *self.models.creating()):
            self.failures.check(model_id, stamp)
        if waiter.use.intent == "background":
            self._refuse_to_wait(model_id)
        waiters = self._waiters.setdefault(model_id, [])
        waiters.append(waiter)
        try:
            await self.models.value(
                model_id,
                partial(self._load, listing, stamp),
                is_claimed=lambda: waiter.container is not None,
            )
        except _Abandoned:
            pass
        finally:
            waiters.remove(waiter)
            if not waiters and self._waiters.get(model_id) is waiters:
                del self._waiters[model_id]

    async def evict(self, model_id: str) -> bool:
        """Take a model down, a load of it included. False when there was neither. Returns when
        it is gone, also when somebody else took it down."""
        self._on_leaving(model_id)
        return await self.models.remove(model_id, self._take_down) is not None

    async def evict_all(self, names: Sequence[str]) -> None:
        await asyncio.gather(*(self.evict(name) for name in names))

    async def clear(self) -> None:
        """Everything, loads under way included: who waits for one gets a fresh one."""
        await self.models.remove_all(self._take_down)

    def close(self) -> None:
        """Start no more loads and drop those that run."""
        self.is_closed = True
        self.models.abandon()

    def check(self) -> None:
        """Raises AssertionError when something is counted twice or left behind."""
        self.models.check()
        assert len(self._reserved) <= 1, "two cold loads at once"
        assert all(self._waiters.values()), "a load that nobody waits for is remembered"

    def _publish(self, model_id: str, container: ModelContainer) -> None:
        for waiter in self._waiters.get(model_id, ()):
            self._on_loaded(waiter, container)

    async def _load(self, listing: Listing, stamp: Stamp) -> ModelContainer:
        """Raises what every waiter shall see; a failure of the bundle is remembered."""
        model_id = listing.model_id
        try:
            async with self._slot:
                self._check_wanted(model_id)
                self._reserved[model_id] = listing.size_bytes
                try:
                    footprint = await self._run(lambda: self._source.footprint(listing))
                    self._reserved[model_id] = footprint
                    self._check_wanted(model_id)
                    await self._make_room(listing)
                    self._check_wanted(model_id)
                    container = await self._build(listing, stamp)
                finally:
                    del self._reserved[model_id]
        except asyncio.CancelledError:
            self._check_open()
            raise
        self._residents.listings[model_id] = listing
        return container

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineShutdown("the server is shutting down") from None

    def _check_wanted(self, model_id: str) -> None:
        self._check_open()
        if model_id not in self._waiters:
            logger.info("%s: loaded for nobody, given up", model_id)
            raise _Abandoned

    def _refuse_to_wait(self, model_id: str) -> None:
        others = {*self.models.creating(), *self.models.draining()} - {model_id}
        if others:
            raise LoadRefused(
                f"{model_id} is not loaded in the background while {min(others)} comes or goes"
            )

    async def _make_room(self, listing: Listing) -> None:
        """Take down what must go for the newcomer. Streams that run there end first."""
        policy, limit = self.settings.eviction, 0
        if policy == "manual_multi_model":
            memory = await self._run(self._source.memory_bytes)
            limit = int(self.settings.ram_soft_threshold * memory)
        resident = {
            name: container.footprint_bytes
            for name in self.models.names()
            if (container := self.models.get(name)) is not None
            # Strict keeps one model for text and one for vectors: programs that use both ask
            # them in turns, and would load a model for every question.
            and (policy != "strict_single_model" or container.is_embedder == listing.is_embedder)
        }
        chosen = victims(policy, resident, incoming_bytes=self.inflight_bytes, limit_bytes=limit)
        waiters = self._waiters.get(listing.model_id, [])
        if chosen and all(waiter.use.intent == "background" for waiter in waiters):
            raise LoadRefused(
                f"{listing.model_id} is not loaded in the background: {', '.join(chosen)} would "
                "have to go; unload it, or ask for the model in the foreground"
            )
        await self.evict_all(chosen)
        if policy == "strict_single_model":
            await self.models.drained()  # what went of itself has to be gone too

    async def _build(self, listing: Listing, stamp: Stamp) -> ModelContainer:
        model_id = listing.model_id
        started = self._clock()
        try:
            container = await self._run(lambda: self._load_now(listing))
            try:
                size = container.batch_size(self.capacity)
                engine = await self._engines.engine(model_id, container.make_engine, size)
                self._residents.faces[model_id] = container.face(engine)
                self._check_wanted(model_id)
            except Exception:
                await self._engines.shutdown_engine(model_id)
                await self._run(container.free)
                raise
        except _Abandoned:
            raise
        except OsaurusError as error:
            failure = error
        except MemoryError:
            failure = InsufficientResources(f"{model_id} does not fit into this machine's memory")
        except Exception as error:
            logger.exception("%s: loading failed", model_id)
            failure = BundleError(f"{model_id} failed to load: {type(error).__name__}: {error}")
        else:
            self.failures.forget(model_id)
            logger.info("%s: loaded in %.1f s", model_id, self._clock() - started)
            return container
        self._residents.forget(model_id)
        self._check_open()
        logger.warning("%s: not loaded: %s", model_id, failure.message)
        self.failures.note(model_id, failure, stamp, self.settings.failure_pause_s)
        raise failure

    def _load_now(self, listing: Listing) -> ModelContainer:
        """On a loader thread. What came too late for anyone is given back there."""
        container = self._source.load(listing)
        if self.is_closed:
            container.free()
        return container

    async def _take_down(self, container: ModelContainer) -> None:
        """Nobody can find the model any more; when its streams are over, its memory goes."""
        model_id, wait_s = container.model_id, self.settings.eviction_wait_s
        if not await self._lease.wait_for_zero(model_id, wait_s):
            logger.warning("%s: its unload ends streams that ran on for %.0f s", model_id, wait_s)
        await self._engines.shutdown_engine(model_id)
        await self._lease.wait_for_zero(model_id)
        await self._engines.shutdown_engine(model_id)  # one that a late caller had built
        self._residents.forget(model_id)
        await self._run(container.free)
        logger.info("%s: unloaded", model_id)
