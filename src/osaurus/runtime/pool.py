"""Which models are resident, and the promise that nobody loses one while using it.

In: a name. Out: a `HeldModel`, whose release is the caller's one duty. One event loop owns the
state; loading and shutting down run on threads.

    absent --acquire--> loading --ok--> resident --evict, unload--> draining --leases 0--> absent
                          |                 ^
                          +--failed--> refused for a pause, or until the files change

A load is shared: who joins it and leaves never cancels it for the others, and what nobody waits
for any more is not kept (`loader.py`). While a model drains, a new request for it waits and then
loads it afresh. The last release starts the timer that unloads it (`residency.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from osaurus.errors import DeviceLost, EngineShutdown, LoadRefused, ModelNotLoaded
from osaurus.runtime.blocking import on_thread
from osaurus.runtime.cache_totals import CacheTotals
from osaurus.runtime.held import HeldModel, Waiter
from osaurus.runtime.lease import ModelLease
from osaurus.runtime.live_chats import LiveChats
from osaurus.runtime.loader import ModelLoader
from osaurus.runtime.model import (
    Listing,
    LoadedModel,
    ModelContainer,
    ModelSource,
    PromptModel,
)
from osaurus.runtime.registry import EngineRegistry, RunBlocking
from osaurus.runtime.residency import ModelResidency
from osaurus.runtime.residents import Residents
from osaurus.types.runtime import ModelUse, ResidencyPolicy, RuntimeSettings, UseSource

logger = logging.getLogger(__name__)

#: How long a quit waits for each model's streams to end after its engine was shut down.
_QUIT_DRAIN_S = 2.0

#: Loads for one caller when no engine can be built on the weights that are there.
_MAX_LOADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentModel:
    """One row of `/health`: an observation, not a reservation. `unload_in_s` is None while the
    model is used and for one that stays; `policy` says what will hold after its last use."""

    model: LoadedModel
    is_current: bool
    num_leases: int
    owner: UseSource | None = None
    unload_in_s: float | None = None
    policy: ResidencyPolicy = field(default_factory=ResidencyPolicy)


class ModelRuntime:
    """Many models, one machine. Every method but the plain getters must run on one loop.

    `run` makes blocking calls and `sleep` waits for residency timers: a test that controls both
    and `clock` decides every order of events.
    """

    def __init__(
        self,
        source: ModelSource,
        settings: RuntimeSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        run: RunBlocking = on_thread,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.settings = settings or RuntimeSettings()
        self.lease = ModelLease()
        self.chats = LiveChats()
        self.engines = EngineRegistry(run)
        self.lost_device: str | None = None  #: why models cannot be run in this process any more
        self._source = source
        self._run = run
        self._residents = Residents()
        self._residency = ModelResidency(
            self._unload_idle,
            num_leases=self.lease.count,
            is_resident=self._is_resident,
            clock=clock,
            sleep=sleep,
        )
        self._loader = ModelLoader(
            source,
            self.settings,
            engines=self.engines,
            lease=self.lease,
            residents=self._residents,
            on_loaded=self._take,
            on_leaving=self._residency.cancel,
            clock=clock,
            run=run,
        )

    # Using models.

    async def acquire(
        self, name: str, *, allow_paths: bool = False, use: ModelUse | None = None
    ) -> HeldModel:
        """The model called `name`, loaded if need be, with a lease on it.

        `allow_paths` is for names that the operator gave, never for a client's. Raises
        `ModelNotFound`, what was wrong with the bundle, `LoadRefused` for a background use that
        would disturb others, `ModelNotLoaded` where the settings let no request load it,
        `DeviceLost`, or `EngineShutdown`.
        """
        use = use or ModelUse()
        is_live = use.intent == "interactive"
        if is_live:
            self.chats.begin()
        try:
            if not is_live and not await self.chats.wait_idle(self.settings.background_wait_s):
                raise LoadRefused(f"{name} is not used in the background while chats are live")
            model = await self._leased(name, allow_paths, use)
        except BaseException as error:
            if is_live:
                self.chats.end()
            if isinstance(error, DeviceLost):
                self.lost_device = error.message
            raise
        self._residents.note_use(model.model_id, name, use)
        return HeldModel(model, partial(self._end_use, model.model_id, is_live))

    async def unload(self, name: str) -> bool:
        """Wait until nobody uses the model, then free it; streams that take longer than the
        settings allow are ended first. False when it was neither resident nor loading.

        Requests that arrive meanwhile wait and load it again. Never deletes a file.
        """
        model_id = self._resident_id(name)
        if model_id is None:
            model_id = (await self.find(name)).model_id
        self._residents.by_hand.discard(model_id)
        return await self._loader.evict(model_id)

    async def unload_not_in(self, keep: Sequence[str]) -> None:
        """Unload every model that is neither in `keep` nor in use."""
        kept = {*map(self._residents.id_of, keep), *self.lease.active_names()}
        await self._loader.evict_all([n for n in self._loader.models.names() if n not in kept])

    async def clear_all(self, *, by_hand: bool = False) -> None:
        """Unload everything, as `unload` does, loads under way included: what a load reads has
        changed, or somebody wants it all gone. Who waits for a load gets a fresh one."""
        self._residency.cancel_all()
        if by_hand:
            self._residents.by_hand.clear()
        await self._loader.clear()

    async def shut_down(self) -> None:
        """End every stream, stop every engine, forget every model. A load that is running
        is not waited for; its result is thrown away. Idempotent."""
        self._residency.cancel_all()
        self._loader.close()
        await self.engines.shutdown_all()
        for name in self.lease.active_names():
            if not await self.lease.wait_for_zero(name, _QUIT_DRAIN_S):
                logger.warning("%s: streams did not end in time", name)
        self._residents.clear()

    def cancel(self, request_id: str) -> bool:
        """Cancel one request. Its engine and its model stay."""
        return self.engines.cancel(request_id)

    # Settings and timers.

    def apply(self, settings: RuntimeSettings) -> None:
        """Make changed settings live: timers run by the new policy from the moment in which
        their models fell idle, the batch size changes with each model's next request, names
        are looked up anew."""
        self.settings = self._loader.settings = settings
        self._residents.forget_names()
        for idle in self._residency.idle_models():
            self._residency.reschedule(idle.name, self._policy(idle.name))

    def keep_resident(self, name: str, policy: ResidencyPolicy | None) -> None:
        """Give a resident model a policy of its own until it is unloaded; None takes it back."""
        model_id = self._resident_id(name)
        if model_id is None:
            return
        if policy is None:
            self._residents.policies.pop(model_id, None)
        else:
            self._residents.policies[model_id] = policy
        self._residency.reschedule(model_id, self._policy(model_id))

    def release_owned(
        self, owner: UseSource, grace_s: float, still_wanted: Callable[[], bool] | None = None
    ) -> None:
        """`owner` has gone: models that it used last may go after `grace_s`."""
        for name, used_by in list(self._residents.owners.items()):
            if used_by == owner:
                self._residency.accelerate(name, grace_s, still_wanted)

    @property
    def capacity(self) -> int:
        """Requests of one model that run at the same time."""
        return self._loader.capacity

    # Looking.

    async def catalog(self) -> Sequence[Listing]:
        """Every model that could be served, and those loaded from elsewhere by path. One that
        has shown itself broken could not, until its files are other ones."""
        known = self._residents.listings
        listings = {name: known[name] for name in self._loader.models.names()}
        listings |= {one.model_id: one for one in await self._run(self._servable)}
        return sorted(listings.values(), key=lambda listing: listing.model_id.lower())

    def _servable(self) -> list[Listing]:
        broken = self._loader.failures.is_broken
        return [one for one in self._source.catalog() if not broken(one.model_id, one.path)]

    async def find(self, name: str, *, allow_paths: bool = False) -> Listing:
        """Raises `ModelNotFound`. Loads nothing."""
        if (model_id := self._resident_id(name)) is not None:
            return self._residents.listings[model_id]
        return await self._run(lambda: self._source.find(name, allow_paths=allow_paths))

    async def read(self, name: str) -> PromptModel:
        """What prompts for the model are made with. Waits for no engine and loads no weights.
        Raises `ModelNotFound` or what is wrong with the bundle."""
        listing = await self.find(name)
        face = self._residents.faces.get(listing.model_id)
        return await self._run(lambda: self._source.read(listing)) if face is None else face

    @property
    def current(self) -> str | None:
        """The model used last, if it is still resident."""
        current = self._residents.current
        return current if current is not None and self._is_resident(current) else None

    def is_resident(self, name: str) -> bool:
        """Whether `name` is loaded, by its id or a name that led to it."""
        return self._resident_id(name) is not None

    @property
    def is_shut_down(self) -> bool:
        return self._loader.is_closed

    def resident(self) -> list[ResidentModel]:
        """The current model first, then by name."""
        known = self._residents
        unload_in = {idle.name: idle.unload_in_s for idle in self._residency.idle_models()}
        rows = [
            ResidentModel(
                model=known.faces[name],
                is_current=name == known.current,
                num_leases=self.lease.count(name),
                owner=known.owners.get(name),
                unload_in_s=unload_in.get(name),
                policy=self._policy(name),
            )
            for name in self._loader.models.names()
        ]
        return sorted(rows, key=lambda row: (not row.is_current, row.model.model_id))

    @property
    def unloaded_cache(self) -> CacheTotals:
        """What the caches of engines did that are gone."""
        return self.engines.retired_cache()

    def loading(self) -> list[str]:
        return self._loader.models.creating()

    @property
    def inflight_load_bytes(self) -> int:
        """Reserved for loads that are under way."""
        return self._loader.inflight_bytes

    def failures(self) -> Mapping[str, str]:
        """Why each model that failed to load did, in one line."""
        return self._loader.failures.messages()

    def check(self) -> None:
        """Raises AssertionError when something is counted twice or left behind."""
        self._loader.check()
        self.engines.check()
        idle_names = {idle.name for idle in self._residency.idle_models()}
        for name in () if self.is_shut_down else self._loader.models.names():
            is_kept = name in idle_names or self.lease.count(name)
            assert is_kept, f"{name}: resident, unused, and nothing decided about it"
        for idle in self._residency.idle_models():
            assert self.lease.count(idle.name) == 0, f"{idle.name}: a timer runs during a lease"
            assert self._is_resident(idle.name), f"{idle.name}: a timer without a model"

    # Leases.

    def _is_resident(self, model_id: str) -> bool:
        return self._loader.models.get(model_id) is not None

    def _resident_id(self, name: str) -> str | None:
        model_id = self._residents.id_of(name)
        return model_id if self._is_resident(model_id) else None

    async def _leased(self, name: str, allow_paths: bool, use: ModelUse) -> LoadedModel:
        """The model with an engine that runs, and one lease taken."""
        for num_loads in range(1, _MAX_LOADS + 1):
            container = await self._container(name, allow_paths, use)
            model_id = container.model_id
            try:
                return await self._face(container)
            except Exception as error:
                self._release(model_id)
                if num_loads == _MAX_LOADS or self.is_shut_down:
                    raise
                logger.error("%s: no engine on its weights, loading anew: %s", model_id, error)
                await self._loader.evict(model_id)
            except BaseException:
                self._release(model_id)
                raise
        raise AssertionError("unreachable")

    async def _container(self, name: str, allow_paths: bool, use: ModelUse) -> ModelContainer:
        """Find or load the model and take one lease on it."""
        while True:
            if self.is_shut_down:
                raise EngineShutdown("the server is shutting down")
            waiter = Waiter(use)
            listing: Listing | None = None
            model_id = self._resident_id(name)
            if model_id is None:
                listing = await self.find(name, allow_paths=allow_paths)
                model_id = listing.model_id
            if use.by_hand:
                self._residents.by_hand.add(model_id)
            resident = self._loader.models.get(model_id)
            if resident is not None:
                self._take(waiter, resident)
            elif listing is not None:
                self._check_may_load(model_id, use)
                try:
                    await self._loader.join(listing, waiter)
                except BaseException:
                    if waiter.container is not None:
                        self._release(model_id)
                    raise
            if waiter.container is not None:
                return waiter.container

    async def _face(self, container: ModelContainer) -> LoadedModel:
        model_id = container.model_id
        size = container.batch_size(self.capacity)
        engine = await self.engines.engine(model_id, container.make_engine, size)
        face = self._residents.faces.get(model_id)
        if face is None or face.engine is not engine:
            face = self._residents.faces[model_id] = container.face(engine)
        return face

    def _check_may_load(self, model_id: str, use: ModelUse) -> None:
        """Whether the settings let this use load the model. Who joins a load may."""
        if use.by_hand or model_id in self._loader.models.creating():
            return
        if not self.settings.loads_on_request and model_id not in self._residents.by_hand:
            raise ModelNotLoaded(model_id, "power.jitLoad")
        if not self.settings.wakes_on_request and model_id in self._residents.asleep:
            raise ModelNotLoaded(model_id, "power.wakeOnRequest")

    def _take(self, waiter: Waiter, container: ModelContainer) -> None:
        self._residents.asleep.discard(container.model_id)
        self._residency.mark_active(container.model_id)
        self.lease.acquire(container.model_id)
        waiter.container = container

    def _release(self, model_id: str) -> None:
        self.lease.release(model_id)
        if not self.lease.count(model_id) and self._is_resident(model_id):
            self._residency.schedule(model_id, self._policy(model_id))

    def _end_use(self, model_id: str, is_live: bool) -> None:
        self._release(model_id)
        if is_live:
            self.chats.end()

    def _policy(self, model_id: str) -> ResidencyPolicy:
        return self._residents.policies.get(model_id, self.settings.residency)

    async def _unload_idle(self, model_id: str) -> None:
        if self._is_resident(model_id) and not self.lease.count(model_id):
            self._residents.asleep.add(model_id)
            await self._loader.evict(model_id)
