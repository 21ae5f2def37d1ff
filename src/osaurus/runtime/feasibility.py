"""What pressure the load that was tried last put this machine under, for `/health`.

Pure: the load's plan and the two thresholds in, figures out. It refuses nothing; that is the
plan's affair.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from osaurus.runtime.machine import Memory
from osaurus.runtime.memory import LoadPlan, Verdict, feasibility


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFeasibility:
    """Where the model runs: a device's memory or the host's. `resident_weights_bytes` is all that
    other models take, `required_available_bytes` what must have been free for it."""

    model: str
    verdict: Verdict
    incoming_weights_bytes: int
    incoming_load_footprint_bytes: int
    resident_weights_bytes: int
    kv_headroom_bytes: int
    projected_bytes: int
    physical_memory_bytes: int
    available_memory_bytes: int
    required_available_bytes: int
    soft_limit_bytes: int
    hard_limit_bytes: int

    @classmethod
    def of(cls, plan: LoadPlan, *, soft: float, hard: float) -> LoadFeasibility:
        """Thresholds are shares of the memory, in either order."""
        soft, hard = sorted(min(1.0, max(0.0, share)) for share in (soft, hard))
        place = plan.judgements[0]
        needs = plan.working_set
        others = place.needed_bytes - needs.total_bytes
        memory = Memory(
            name=place.place,
            physical_bytes=place.physical_bytes,
            available_bytes=place.available_bytes,
        )
        verdict = feasibility(
            needed_bytes=needs.total_bytes, others_bytes=others, memory=memory, soft=soft, hard=hard
        )
        return cls(
            model=plan.model_id,
            verdict=verdict if plan.is_estimated else "unknown",
            incoming_weights_bytes=needs.weights_bytes,
            incoming_load_footprint_bytes=needs.total_bytes,
            resident_weights_bytes=others,
            kv_headroom_bytes=needs.kv_bytes + needs.state_bytes,
            projected_bytes=place.needed_bytes,
            physical_memory_bytes=place.physical_bytes,
            available_memory_bytes=place.available_bytes,
            required_available_bytes=needs.total_bytes,
            soft_limit_bytes=int(soft * place.physical_bytes),
            hard_limit_bytes=int(hard * place.physical_bytes),
        )

    def document(self) -> dict[str, Any]:
        return asdict(self)
