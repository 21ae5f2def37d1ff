"""What happened in an engine, as values that only grow."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals since the engine was built. `forward_retries` counts batches that failed as a
    whole and were run again slot by slot, `rederived_tokens` those fed again for the cache's
    sake while nobody waited."""

    steps: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    rederived_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    forward_retries: int = 0

    def plus(self, **counts: int) -> EngineStats:
        return replace(self, **{name: getattr(self, name) + n for name, n in counts.items()})
