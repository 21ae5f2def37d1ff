"""Settings that change while models are served: brought to the runtime at the next request.

file, override --store--> values --refresh--> sampling, capacity, residency   at once
                                          --> options of the next load        idle models go
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from osaurus.runtime.configure import load_options, runtime_settings, sampling_of
from osaurus.runtime.feasibility import LoadFeasibility
from osaurus.runtime.load import LoadOptions
from osaurus.runtime.memory import Limits, LoadPlan
from osaurus.runtime.pool import ModelRuntime
from osaurus.settings.fields import Setting
from osaurus.settings.load import Settings
from osaurus.settings.store import SettingsStore
from osaurus.types.runtime import RuntimeSettings

logger = logging.getLogger(__name__)


class _Source(Protocol):
    """Takes the options of the loads that follow."""

    options: LoadOptions

    @property
    def last_plan(self) -> LoadPlan | None: ...

    def memory_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Which of the changed settings count when."""

    live: tuple[str, ...] = ()
    next_load: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()

    @classmethod
    def of(cls, changed: Sequence[Setting]) -> Effects:
        def keys(when: str) -> tuple[str, ...]:
            return tuple(one.key for one in changed if one.is_used and one.live == when)

        return cls(live=keys("live"), next_load=keys("next load"), restart=keys("restart"))


class LiveSettings:
    """One event loop owns it. `sampling` and `keeps_attribution` are what holds now."""

    def __init__(
        self, store: SettingsStore, source: _Source, *, default_model: str | None = None
    ) -> None:
        """`source` loads as the settings say. Raises `InvalidField` for settings that are
        wrong at the start. `default_model` is what `network.servedModelName` means."""
        self._default_model = default_model or "default"
        self.store = store
        self._settings = store.snapshot()
        self._source = source
        self._clearing: set[asyncio.Task[None]] = set()
        self._resolve()

    def _resolve(self) -> None:
        options = load_options(self._settings)
        self._source.options = replace(options, default_model=self._default_model)
        self.runtime: RuntimeSettings = runtime_settings(
            self._settings, max_concurrent=options.engine.max_batch_size
        )
        self.sampling: Mapping[str, Any] = sampling_of(self._settings)
        self.keeps_attribution: bool = self._settings["prompt.keepAttributionLine"]

    @property
    def settings(self) -> Settings:
        """As last applied."""
        return self._settings

    @property
    def requests_per_minute(self) -> int | None:
        """As the file has it this moment: it decides before a request refreshes anything."""
        return self.store.snapshot()["network.rateLimitRequestsPerMinute"]

    @property
    def limits(self) -> Limits:
        return self._source.options.limits

    @property
    def last_plan(self) -> LoadPlan | None:
        """Of the load that was tried last."""
        return self._source.last_plan

    @property
    def feasibility(self) -> LoadFeasibility | None:
        """Of the load that was tried last, judged by the thresholds that hold now."""
        plan = self.last_plan
        if plan is None:
            return None
        return LoadFeasibility.of(
            plan,
            soft=self._settings["residency.loadRAMSoftThreshold"],
            hard=self._settings["residency.loadRAMHardThreshold"],
        )

    @property
    def memory_bytes(self) -> int:
        """Physical, of the place where models run."""
        return self._source.memory_bytes()

    async def refresh(self, runtime: ModelRuntime) -> Effects:
        """Apply what has changed since the last time; costs one look at the file. Models whose
        load read something that changed are unloaded when their streams have ended."""
        settings = self.store.snapshot()
        if settings is self._settings:
            return Effects()
        effects = Effects.of(self._settings.differing(settings))
        self._settings = settings
        self._resolve()
        runtime.apply(self.runtime)
        if effects.next_load:
            logger.info("models are loaded anew: %s changed", ", ".join(effects.next_load))
            task = asyncio.create_task(runtime.clear_all())
            self._clearing.add(task)
            task.add_done_callback(self._clearing.discard)
            await asyncio.sleep(0)  # from here on nobody gets a model that is to go
        return effects
