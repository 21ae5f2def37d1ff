"""What loading a bundle with certain options would take here, and whether that is allowed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from osaurus.runtime.geometry import read_geometry
from osaurus.runtime.loaded_bytes import loaded_bytes
from osaurus.runtime.machine import device_memory, host_memory
from osaurus.runtime.memory import LoadFacts, LoadPlan, plan_load

if TYPE_CHECKING:
    from osaurus.runtime.load import LoadOptions
    from osaurus.types.weights import TensorFacts

logger = logging.getLogger(__name__)


class _Bundle(Protocol):
    @property
    def model_id(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    def tensor_facts(self) -> Sequence[TensorFacts]: ...


def plan_of(
    bundle: _Bundle, options: LoadOptions, device: str, *, others_bytes: int = 0
) -> LoadPlan:
    """Reads this machine's memory; loads nothing. `others_bytes` is what stays loaded."""
    engine = options.engine
    facts = LoadFacts(
        model_id=bundle.model_id,
        weights_bytes=loaded_bytes(
            bundle.tensor_facts(), bundle.config, options.compute_mode, options.quantize
        ),
        geometry=read_geometry(bundle.config),
        capacity=engine.max_batch_size,
        context_tokens=engine.max_context_tokens,
        chunk_tokens=engine.prefill_chunk_tokens,
        kv_item_bytes=4 if options.compute_mode == "float32" else 2,
        kv_budget_bytes=engine.kv_budget_bytes,
        snapshots=engine.cache.recurrent_entries,
    )
    return plan_load(
        facts, options.limits, host_memory(), device_memory(device), others_bytes=others_bytes
    )


def check_memory(
    bundle: _Bundle, options: LoadOptions, device: str, *, others_bytes: int = 0
) -> LoadPlan:
    """The plan, told in the log. Whoever loads must heed `allowed`."""
    plan = plan_of(bundle, options, device, others_bytes=others_bytes)
    logger.info("%s %s", plan.model_id, plan.summary)
    for warning in plan.warnings:
        logger.warning("%s", warning)
    return plan
