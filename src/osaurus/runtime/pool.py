"""Which models are resident, and the promise that nobody loses one while using it.

In: a name. Out: a `HeldModel`, whose release is the caller's one duty. One event loop owns the
state; loading and shutting down run on threads.

    absent --acquire--> loading --ok--> resident --unload--> draining --leases 0--> absent
                          |                 ^
                          +--failed--> refused for a pause, or until the files change

A load is shared: who joins it and leaves never cancels it for the others. While a model drains,
a new request for it waits and then loads it afresh. Eviction, residency timers and memory
admission are not decided here yet; whoever adds them must go through `unload`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from osaurus.errors import (
    BundleError,
    EngineShutdown,
    InsufficientResources,
    OsaurusError,
)
from osaurus.runtime.blocking import on_thread
from osaurus.runtime.cache_totals import CacheTotals
from osaurus.runtime.lease import ModelLease
from osaurus.runtime.model import Listing, LoadedModel, ModelSource

logger = logging.getLogger(__name__)

_Stamp = tuple[tuple[str, int, int], ...]

#: Names remembered for resident models, so that a request need not search the disk.
_MAX_NAMES = 256

#: How long a quit waits for each model's streams to end after its engine was shut down.
_QUIT_DRAIN_S = 2.0


class HeldModel:
    """A resident model with a lease on it. Release it when the stream has drained."""

    def __init__(self, model: LoadedModel, lease: ModelLease) -> None:
        self.model = model
        self._lease: ModelLease | None = lease
        lease.acquire(model.model_id)

    def release(self) -> None:
        """Idempotent."""
        if self._lease is not None:
            self._lease.release(self.model.model_id)
            self._lease = None

    def __enter__(self) -> LoadedModel:
        return self.model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentModel:
    """One row of `/health`: an observation, not a reservation."""

    model: LoadedModel
    is_current: bool
    num_leases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """Why a model could not be loaded, and the files as they were then."""

    error: OsaurusError
    retry_at_s: float
    stamp: _Stamp


class ModelRuntime:
    """Many models, one machine. Every method but the plain getters must run on one loop."""

    def __init__(
        self,
        source: ModelSource,
        *,
        failure_pause_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease = ModelLease()
        self._source = source
        self._failure_pause_s = failure_pause_s
        self._clock = clock
        self._resident: dict[str, LoadedModel] = {}
        self._listings: dict[str, Listing] = {}  # of the resident models
        self._loading: dict[str, asyncio.Task[OsaurusError | None]] = {}
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, LoadedModel] = {}  # what drains
        self._failures: dict[str, LoadFailure] = {}
        self._unloaded_cache = CacheTotals()
        self._names: dict[str, str] = {}  # names that led to a resident model -> its id
        self._current: str | None = None
        self._is_shut_down = False

    async def acquire(self, name: str, *, allow_paths: bool = False) -> HeldModel:
        """The model called `name`, loaded if need be, with a lease on it.

        `allow_paths` is for names that the operator gave, never for a client's. Raises
        `ModelNotFound`, what was wrong with the bundle, or `EngineShutdown`.
        """
        listing: Listing | None = None
        model_id = self._resident_id(name)
        while True:
            if self._is_shut_down:
                raise EngineShutdown("the server is shutting down")
            if model_id is None:
                listing = await self.find(name, allow_paths=allow_paths)
                model_id = listing.model_id
                continue  # other requests ran meanwhile
            if model_id in self._draining:
                await asyncio.wait({self._draining[model_id]})
            elif model_id in self._resident:
                model = self._resident[model_id]
                if not model.engine.capacity_snapshot().is_shutdown:
                    self._current = model_id
                    if len(self._names) < _MAX_NAMES:
                        self._names[name] = model_id
                    return HeldModel(model, self.lease)
                logger.error("%s: its engine stopped by itself; loading it again", model_id)
                self._start_draining(model_id)
            elif model_id in self._loading:
                # `wait` leaves the task alone when this caller is cancelled.
                task = self._loading[model_id]
                await asyncio.wait({task})
                if not task.cancelled() and (error := task.result()) is not None:
                    raise error.with_traceback(None)
            elif listing is None:
                model_id = None  # it was unloaded since; look it up again
            else:
                stamp = await on_thread(lambda path=listing.path: _stamp(path))
                if model_id not in self._loading and model_id not in self._resident:
                    self._start_loading(listing, stamp)

    async def unload(self, name: str) -> bool:
        """Wait until nobody uses the model, then free it. False when it was not resident.

        Requests that arrive meanwhile wait and load it again. Never deletes a file.
        """
        model_id = self._resident_id(name)
        if model_id is None:
            model_id = (await self.find(name)).model_id
        if model_id in self._loading:
            await asyncio.wait({self._loading[model_id]})
        was_resident = model_id in self._resident
        if was_resident:
            self._start_draining(model_id)
        if model_id in self._draining:
            await asyncio.wait({self._draining[model_id]})
        return was_resident

    async def shut_down(self) -> None:
        """End every stream, stop every engine, forget every model. A load that is running
        is not waited for; its result is thrown away. Idempotent."""
        self._is_shut_down = True
        models = [*self._resident.values(), *self._leaving.values()]
        await asyncio.gather(*(on_thread(model.engine.shutdown) for model in models))
        for model in models:
            if not await self.lease.wait_for_zero(model.model_id, _QUIT_DRAIN_S):
                logger.warning("%s: streams did not end in time", model.model_id)
        for task in (*self._draining.values(), *self._loading.values()):
            task.cancel()
        self._resident.clear()
        self._listings.clear()
        self._names.clear()
        self._current = None

    async def catalog(self) -> Sequence[Listing]:
        """Every model that could be served, and those loaded from elsewhere by path."""
        listings = {listing.model_id: listing for listing in self._listings.values()}
        listings |= {one.model_id: one for one in await on_thread(self._source.catalog)}
        return sorted(listings.values(), key=lambda listing: listing.model_id.lower())

    async def find(self, name: str, *, allow_paths: bool = False) -> Listing:
        """Raises `ModelNotFound`. Loads nothing."""
        if (model_id := self._resident_id(name)) is not None:
            return self._listings[model_id]
        return await on_thread(lambda: self._source.find(name, allow_paths=allow_paths))

    @property
    def current(self) -> str | None:
        """The model used last, if it is still resident."""
        return self._current

    def resident(self) -> list[ResidentModel]:
        """The current model first, then by name."""
        rows = [
            ResidentModel(
                model=model,
                is_current=model_id == self._current,
                num_leases=self.lease.count(model_id),
            )
            for model_id, model in self._resident.items()
        ]
        return sorted(rows, key=lambda row: (not row.is_current, row.model.model_id))

    @property
    def unloaded_cache(self) -> CacheTotals:
        """What the caches of models did that are no longer resident."""
        return self._unloaded_cache

    def loading(self) -> list[str]:
        return sorted(self._loading)

    def failures(self) -> Mapping[str, str]:
        """Why each model that failed to load did, in one line."""
        return {name: failure.error.message for name, failure in self._failures.items()}

    def _resident_id(self, name: str) -> str | None:
        return name if name in self._resident else self._names.get(name)

    def _start_loading(self, listing: Listing, stamp: _Stamp) -> None:
        """Raises the last failure instead while its pause lasts and the files are the same."""
        failure = self._failures.get(listing.model_id)
        if failure is not None and self._clock() < failure.retry_at_s and failure.stamp == stamp:
            raise failure.error.with_traceback(None)
        self._loading[listing.model_id] = asyncio.create_task(self._load(listing, stamp))

    async def _load(self, listing: Listing, stamp: _Stamp) -> OsaurusError | None:
        """Publish the model or remember the failure. Returns the error so that a load whose
        joiners have all left is never an unread exception."""
        model_id = listing.model_id
        started = self._clock()
        try:
            model = await on_thread(lambda: self._build(listing))
        except OsaurusError as error:
            failure = error
        except MemoryError:
            failure = InsufficientResources(f"{model_id} does not fit into this machine's memory")
        except Exception as error:
            logger.exception("%s: loading failed", model_id)
            failure = BundleError(f"{model_id} failed to load: {type(error).__name__}: {error}")
        else:
            self._failures.pop(model_id, None)
            if self._is_shut_down:
                return EngineShutdown("the server is shutting down")
            self._resident[model_id] = model
            self._listings[model_id] = listing
            logger.info("%s: loaded in %.1f s", model_id, self._clock() - started)
            return None
        finally:
            del self._loading[model_id]
        logger.warning("%s: not loaded: %s", model_id, failure.message)
        self._failures[model_id] = LoadFailure(
            error=_detached(failure), retry_at_s=self._clock() + self._failure_pause_s, stamp=stamp
        )
        return failure

    def _build(self, listing: Listing) -> LoadedModel:
        """On a loader thread. A model that came too late for anyone leaves no thread behind."""
        model = self._source.load(listing)
        if self._is_shut_down:
            model.engine.shutdown()
        return model

    def _start_draining(self, model_id: str) -> None:
        model = self._resident.pop(model_id)
        del self._listings[model_id]
        self._names = {name: known for name, known in self._names.items() if known != model_id}
        if self._current == model_id:
            self._current = None
        self._leaving[model_id] = model
        self._draining[model_id] = asyncio.create_task(self._drain(model))

    async def _drain(self, model: LoadedModel) -> None:
        try:
            await self.lease.wait_for_zero(model.model_id)
            stats = await on_thread(model.engine.cache_stats)
            self._unloaded_cache += CacheTotals.of(stats)
            await on_thread(model.engine.shutdown)
        finally:
            del self._draining[model.model_id], self._leaving[model.model_id]
        del model
        await on_thread(gc.collect)  # engines and their models refer to each other


def _stamp(path: Path) -> _Stamp:
    """Names, sizes and times of a model's files: equal while nothing was changed."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return ()  # unreadable now; a change that makes it readable gives another stamp
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _detached(error: OsaurusError) -> OsaurusError:
    """The error without the frames that raised it: they hold half a model's memory."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
