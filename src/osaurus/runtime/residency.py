"""When a model that nobody uses goes: one timer a model, armed by the last release.

In: "in use", "idle since now, under this policy". Out: a call of `unload` once the time is up
and nothing has changed. Never decides while a model is used: whoever needs memory sooner evicts,
and cancels the timer. One event loop owns it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from osaurus.types.runtime import ResidencyPolicy

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Idle:
    """A decision about one idle model. `unload_at` is on the clock; None is never."""

    decision: int
    policy: ResidencyPolicy
    since: float
    unload_at: float | None
    timer: asyncio.Task[None] | None = None
    #: An acceleration may turn out not to be wanted; then this time holds again.
    still_wanted: Callable[[], bool] | None = None
    planned_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleModel:
    """`unload_in_s` is None for a model that stays."""

    name: str
    decision: int
    policy: ResidencyPolicy
    idle_s: float
    unload_in_s: float | None


class ModelResidency:
    """`num_leases` and `is_resident` are asked when a timer fires; `unload` is then awaited by
    the timer itself. `clock` gives monotonic seconds and `sleep` waits for them."""

    def __init__(
        self,
        unload: Callable[[str], Awaitable[object]],
        *,
        num_leases: Callable[[str], int],
        is_resident: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._unload = unload
        self._num_leases = num_leases
        self._is_resident = is_resident
        self._clock = clock
        self._sleep = sleep
        self._idle: dict[str, _Idle] = {}
        self._num_decisions = 0
        self._firing: set[asyncio.Task[None]] = set()

    def mark_active(self, name: str) -> None:
        """The model is used: whatever was decided about it no longer holds."""
        self.cancel(name)

    def schedule(self, name: str, policy: ResidencyPolicy) -> int:
        """The model is idle from now on. Returns the decision's number."""
        self.cancel(name)
        self._num_decisions += 1
        now, delay = self._clock(), policy.delay_s
        idle = _Idle(
            decision=self._num_decisions,
            policy=policy,
            since=now,
            unload_at=None if delay is None else now + delay,
        )
        self._idle[name] = idle
        self._arm(name, idle)
        return idle.decision

    def accelerate(
        self, name: str, grace_s: float, still_wanted: Callable[[], bool] | None = None
    ) -> bool:
        """Let an idle model go after `grace_s` where that is sooner; never prolongs. When
        `still_wanted` says no at that time, the time that was planned before holds again."""
        idle = self._idle.get(name)
        at = self._clock() + grace_s
        if idle is None or idle.unload_at is None or idle.unload_at <= at:
            return False
        self._num_decisions += 1
        idle.decision = self._num_decisions
        idle.planned_at = idle.unload_at if idle.planned_at is None else idle.planned_at
        idle.unload_at, idle.still_wanted = at, still_wanted
        self._arm(name, idle)
        return True

    def cancel(self, name: str, decision: int | None = None) -> bool:
        """Forget the timer. With `decision` only that one: a newer decision stands."""
        idle = self._idle.get(name)
        if idle is None or (decision is not None and idle.decision != decision):
            return False
        del self._idle[name]
        if idle.timer is not None:
            idle.timer.cancel()
        return True

    def cancel_all(self) -> None:
        for name in list(self._idle):
            self.cancel(name)

    def reschedule(self, name: str, policy: ResidencyPolicy) -> None:
        """The policy has changed: an idle model's time counts from when it fell idle."""
        idle = self._idle.get(name)
        if idle is None:
            return
        self._num_decisions += 1
        idle.decision, idle.policy = self._num_decisions, policy
        delay = policy.delay_s
        idle.unload_at = None if delay is None else idle.since + delay
        idle.planned_at = idle.still_wanted = None
        self._arm(name, idle)

    def idle_models(self) -> list[IdleModel]:
        """By name."""
        now = self._clock()
        return [
            IdleModel(
                name=name,
                decision=idle.decision,
                policy=idle.policy,
                idle_s=now - idle.since,
                unload_in_s=None if idle.unload_at is None else max(0.0, idle.unload_at - now),
            )
            for name, idle in sorted(self._idle.items())
        ]

    def _arm(self, name: str, idle: _Idle) -> None:
        if idle.timer is not None:
            idle.timer.cancel()
            idle.timer = None
        if idle.unload_at is not None:
            idle.timer = asyncio.create_task(self._run(name, idle, idle.decision))

    async def _run(self, name: str, idle: _Idle, decision: int) -> None:
        while True:
            assert idle.unload_at is not None
            await self._sleep(max(0.0, idle.unload_at - self._clock()))
            if self._idle.get(name) is not idle or idle.decision != decision:
                return
            if self._clock() < idle.unload_at:
                continue  # a sleep may end a little early
            if self._num_leases(name):
                idle.unload_at = idle.timer = None  # the release that comes will arm it anew
                return
            if idle.still_wanted is not None and not idle.still_wanted():
                idle.unload_at, idle.still_wanted = idle.planned_at, None
                continue
            break
        # From here on nothing cancels this task: the unload is under way.
        del self._idle[name]
        if not self._is_resident(name):
            return
        logger.info("%s: idle for %.0f s, unloading", name, self._clock() - idle.since)
        task = asyncio.current_task()
        assert task is not None
        self._firing.add(task)
        task.add_done_callback(self._firing.discard)
        await self._unload(name)
