"""`GET /admin/cache-stats` and `POST /admin/cache/clear`: what the prefix caches did and hold.

Counts only: no text, no token of any prompt. For programs of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.errors import UserError
from osaurus.runtime.blocking import on_thread
from osaurus.runtime.cache_totals import CacheTotals
from osaurus.runtime.live import LiveSettings
from osaurus.runtime.memory import LoadPlan, budget_of
from osaurus.runtime.pool import ModelRuntime, ResidentModel
from osaurus.server.auth import require_owner
from osaurus.server.body import read_json
from osaurus.types.cache import CacheStats

#: Published names of layer counts, by the kinds that a topology counts as such.
_LAYER_COUNTS = {
    "kv_layer_count": ("full_attention", "mla"),
    "rotating_kv_layer_count": ("sliding_window",),
    "mamba_layer_count": ("ssm",),
    "hybrid_pool_layer_count": ("pool",),
    "zaya_cca_layer_count": ("cca",),
}


class ClearBody(Struct, kw_only=True):
    model: str | None = None


class CacheAdmin:
    def __init__(self, runtime: ModelRuntime, live: LiveSettings | None = None) -> None:
        self._runtime = runtime
        self._live = live

    async def cache_stats(self, request: Request) -> Response:
        require_owner(request)
        rows = self._runtime.resident()
        stats = await on_thread(lambda: [row.model.engine.cache_stats() for row in rows])
        totals = sum(map(CacheTotals.of, stats), start=self._runtime.unloaded_cache)
        return _json(
            {
                "status": "ok",
                "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "models": [_row(row, one) for row, one in zip(rows, stats, strict=True)],
                "aggregate": _aggregate(totals),
                "memory_safety": None if self._live is None else _memory_safety(self._live),
            }
        )

    async def clear(self, request: Request) -> Response:
        """Of `model`, or of every loaded one without a body. Loads nothing."""
        require_owner(request)
        wanted = ClearBody()
        if (await request.body()).strip():
            wanted = await read_json(request, ClearBody)
        rows = self._runtime.resident()
        if wanted.model is not None:
            model_id = (await self._runtime.find(wanted.model)).model_id
            rows = [row for row in rows if row.model.model_id == model_id]
            if not rows:
                raise UserError(f"{model_id} is not loaded; a cache is cleared through its model")
        await on_thread(partial(_clear, rows))
        return _json({"status": "ok", "cleared": sorted(row.model.model_id for row in rows)})


def _clear(rows: Sequence[ResidentModel]) -> None:
    for row in rows:
        row.model.engine.clear_cache()


def _row(row: ResidentModel, stats: CacheStats) -> dict[str, Any]:
    model = row.model
    capacity = model.engine.capacity_snapshot()
    kinds = dict(stats.topology)
    counts = {
        name: sum(kinds.get(kind, 0) for kind in counted) for name, counted in _LAYER_COUNTS.items()
    }
    return {
        "name": model.model_id,
        "is_current": row.is_current,
        "weights_bytes": model.size_bytes,
        "effective_kv_mode": stats.kv_mode,
        "cache_topology": {"layer_count": sum(kinds.values()), **counts},
        "paged_cache": {
            "total_blocks": capacity.kv_blocks_total,
            "free_blocks": capacity.kv_blocks_free,
            "allocated_blocks": capacity.kv_blocks_total - capacity.kv_blocks_free,
            "hits": stats.memory_hits,
            "misses": max(0, stats.lookups - stats.memory_hits),
            "evictions": stats.evictions,
        },
        "block_disk_store": {
            "enabled": not stats.disk_off,
            "hits": stats.disk_hits,
            "misses": CacheTotals.of(stats).disk_misses,
            "stores": stats.disk.get("stores", 0),
            "current_bytes": stats.disk.get("bytes", 0),
            "max_size_bytes": stats.disk.get("quota_bytes", 0),
        },
        "stats": msgspec.to_builtins(stats),
    }


def _aggregate(totals: CacheTotals) -> dict[str, int]:
    return {
        "lookups": totals.lookups,
        "prefix_hits": totals.lookups - totals.misses,
        "prefix_misses": totals.misses,
        "paged_hits": totals.memory_hits,
        "paged_misses": max(0, totals.lookups - totals.memory_hits),
        "disk_l2_hits": totals.disk_hits,
        "disk_l2_misses": totals.disk_misses,
        "disk_l2_stores": totals.disk_stores,
        "evictions": totals.evictions,
        "hit_tokens": totals.hit_tokens,
        "prompt_tokens": totals.prompt_tokens,
    }


def _memory_safety(live: LiveSettings) -> dict[str, Any]:
    """What a load may take here, and what was decided of the one that was tried last."""
    settings, limits, plan = live.settings, live.limits, live.last_plan
    physical = live.memory_bytes
    budget = budget_of(limits, physical)
    allows = "any memory" if budget is None else f"{budget} of {physical} bytes"
    return {
        "mode": limits.mode,
        "slider": settings["memorySafety.slider"],
        "display_summary": f"{limits.mode}: a model may take {allows}",
        "resolved_physical_memory_bytes": physical,
        "resolved_load_budget_bytes": budget,
        "last_load_decision": None if plan is None else _decision(plan),
    }


def _decision(plan: LoadPlan) -> dict[str, Any]:
    return {
        "model": plan.model_id,
        "allowed": plan.allowed,
        "summary": plan.summary,
        "estimate_bytes": plan.working_set.total_bytes,
        "working_set": msgspec.to_builtins(plan.working_set),
        "places": [msgspec.to_builtins(one) for one in plan.judgements],
        "warnings": list(plan.warnings),
        "blocking_issues": list(plan.blocking),
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body, order="sorted"), media_type="application/json")
