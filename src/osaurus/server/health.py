"""`GET /health`: what this process holds and does, without loading anything.

Strangers learn that it is up and no more.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from osaurus.runtime.pool import ModelRuntime, ResidentModel
from osaurus.server.limits import Admission
from osaurus.server.peers import is_local


class Health:
    def __init__(self, runtime: ModelRuntime, admission: Admission) -> None:
        self._runtime = runtime
        self._admission = admission
        #: Tells one server process from another at the same address.
        self._instance_id = secrets.token_hex(8)

    async def health(self, request: Request) -> Response:
        body: dict[str, Any] = {
            "status": "healthy",
            "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        if is_local(request):
            body |= self._details()
        return Response(msgspec.json.encode(body), media_type="application/json")

    def _details(self) -> dict[str, Any]:
        resident = self._runtime.resident()
        failures = self._runtime.failures()
        return {
            "instance_id": self._instance_id,
            "loaded": sorted(row.model.model_id for row in resident),
            "current_model": self._runtime.current,
            "inflight": self._runtime.lease.snapshot(),
            "loading": self._runtime.loading(),
            "resident_models": [_row(row) for row in resident],
            "load_errors": failures,
            "engine_last_error": next(reversed(list(failures.values())), None),
            "http_inflight": self._admission.active,
            "http_inference_limit": self._admission.limit,
        }


def _row(row: ResidentModel) -> dict[str, Any]:
    capacity = row.model.engine.capacity_snapshot()
    return {
        "name": row.model.model_id,
        "is_current": row.is_current,
        "inflight": row.num_leases,
        "num_requests_running": capacity.active_count,
        "num_requests_waiting": capacity.pending_count,
        "max_batch_size": capacity.configured_maximum,
        "kv_blocks_total": capacity.kv_blocks_total,
        "kv_blocks_free": capacity.kv_blocks_free,
        "context_tokens": row.model.context_tokens,
        "size_bytes": row.model.size_bytes,
        "draft_strategy": None,
        "native_mtp_depth": None,
        "idle_unload_at": None,
        "idle_seconds_remaining": None,
    }
