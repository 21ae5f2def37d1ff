"""State that prefill did not keep, computed anew when nobody waits.

A request that takes a prefix over passes the end of its stable part without computing it, and
snapshots are evicted. After such a request a replay of its prompt, up to the last boundary
that lacks a snapshot, waits for an idle engine. It is a request without a consumer that never
decodes, and it is given up as soon as anybody else comes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from osaurus.cache.blocks import BlockTable
from osaurus.cache.coordinator import CacheCoordinator
from osaurus.engine.client import Mailbox
from osaurus.engine.request import Phase, Request
from osaurus.engine.scheduler import Scheduler

#: Replays that may wait; the oldest is forgotten first.
MAX_WAITING = 4


class Rederiver:
    def __init__(self, scheduler: Scheduler, cache: CacheCoordinator) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._waiting: deque[Request] = deque(maxlen=MAX_WAITING)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def offer(self, finished: Request) -> None:
        """Remember a request that has had its `Info`, if state of its prompt is missing."""
        if not finished.is_replay and self._cache.replay_of(finished.cached) is not None:
            self._waiting.append(finished)

    def settle(self) -> None:
        """Let a replay begin when the engine is idle; end one that has done its work or is in
        somebody's way. Called between admission and the step's forwards."""
        active, waiting = self._scheduler.active, self._scheduler.waiting
        replay = next((request for request in active if request.is_replay), None)
        if replay is None:
            while self._waiting and not active and not waiting:
                waiting.extend(self._replays_of(self._waiting.popleft()))
        elif replay.phase is Phase.DECODE:
            self._cache.finished(replay.cached, store=True)
            self._scheduler.remove(replay)
        elif waiting or len(active) > 1:
            self._scheduler.remove(replay)

    def _replays_of(self, finished: Request) -> list[Request]:
        """The replay, unless another request has meanwhile done its work."""
        cached = self._cache.replay_of(finished.cached)
        if cached is None:
            return []
        replay = replace(
            finished,
            request_id="",
            is_replay=True,
            prompt=finished.prompt[: cached.prompt_tokens],
            generated=[],
            num_computed=0,
            alone_until=0,
            mailbox=Mailbox(),
            tables=[BlockTable(table.group) for table in finished.tables],
            cached=cached,
            fork_source=None,
            phase=Phase.WAITING,
            cancelled=False,
            poisoned=False,
            was_looked_up=True,
        )
        return [replay]
