"""From admission to the first chunk: what memory and disk hold of a prompt is taken over.

    admitted --> RESTORING (one record a step) --> taken over --> PREFILL or DECODE

Runs on the engine's thread; whatever it raises is the request's failure.
"""

from __future__ import annotations

from collections.abc import Callable

from osaurus.cache.coordinator import CacheCoordinator
from osaurus.engine.request import Phase, Request
from osaurus.engine.scheduler import Scheduler
from osaurus.types.events import PrefillProgress, PrefillStage

#: How long an otherwise idle step waits for a record, so that cancels are still heard.
READ_WAIT_S = 0.02

Report = Callable[[Request, PrefillProgress], None]


class PrefixReuse:
    """`report` tells a request's consumer of progress."""

    def __init__(self, scheduler: Scheduler, cache: CacheCoordinator, report: Report) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._report = report

    def look_up(self, request: Request) -> None:
        """Take over what memory holds of the prompt, or first read more of it from disk."""
        if self._cache.plan_restore(request.cached, request.num_tokens):
            request.phase = Phase.RESTORING
        else:
            self._take_over(request)

    def restoring(self) -> Request | None:
        """The oldest request that waits for the disk."""
        active = self._scheduler.active
        return next((r for r in active if r.phase is Phase.RESTORING), None)

    def read_record(self, request: Request) -> None:
        """Take one record over if it has been read; wait for it only when nobody else has
        something to do."""
        is_alone = all(r.phase is Phase.RESTORING for r in self._scheduler.active)
        covered = self._cache.restore_next(request.cached, READ_WAIT_S if is_alone else 0.0)
        if covered is None:
            return
        if request.cached.record_keys:
            self._tell(request, "cache_restore", min(covered, request.num_prompt), "disk")
        else:
            self._take_over(request)

    def _take_over(self, request: Request) -> None:
        """The lookup is over: what was found counts from now on, and only now."""
        self._scheduler.take_over(request)
        request.settle_phase()
        if request.first_token_at is None and not request.was_looked_up:
            request.was_looked_up = True
            matched = min(request.num_computed, request.num_prompt)
            self._cache.report_lookup(request.cached, matched)
        self._tell(request, "cache_lookup", request.num_computed, request.cached.detail)
        self._tell(request, "prefill", request.num_computed, "running")

    def _tell(self, request: Request, stage: PrefillStage, completed: int, detail: str) -> None:
        total = request.num_prompt
        self._report(
            request,
            PrefillProgress(stage=stage, completed=completed, total=total, detail=detail),
        )
