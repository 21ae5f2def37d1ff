"""`GET /health`: what this process holds and does, and `GET /health/ready`: whether to send it
requests. Neither loads anything; strangers learn that it is up, or ready, and no more.
"""

from __future__ import annotations

import math
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from osaurus.runtime.live import LiveSettings
from osaurus.runtime.pool import ModelRuntime, ResidentModel
from osaurus.server.auth import caller_of
from osaurus.server.limits import Admission


class Readiness:
    """What a supervisor waits for. Set by whoever starts and stops the server."""

    def __init__(self) -> None:
        self.is_preloading = False
        self.is_draining = False
        #: The model that was to be loaded at the start, and why it was not.
        self.default_model: str | None = None
        self.default_error: str | None = None

    @property
    def reason(self) -> str | None:
        """Why no requests should be sent; None when they should."""
        if self.is_draining:
            return "draining"
        return "loading" if self.is_preloading else None


class Health:
    def __init__(
        self,
        runtime: ModelRuntime,
        admission: Admission,
        readiness: Readiness,
        live: LiveSettings | None = None,
    ) -> None:
        self._runtime = runtime
        self._live = live
        self._admission = admission
        self._readiness = readiness
        #: Tells one server process from another at the same address.
        self._instance_id = secrets.token_hex(8)

    async def health(self, request: Request) -> Response:
        body: dict[str, Any] = {
            "status": "healthy",
            "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        if caller_of(request) == "owner":
            body |= self._details()
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def ready(self, request: Request) -> Response:
        """200 when requests are welcome, else 503 with the reason."""
        reason = self._reason()
        body = {"ready": reason is None, "reason": reason}
        status = 200 if reason is None else 503
        return Response(msgspec.json.encode(body), status, media_type="application/json")

    def _details(self) -> dict[str, Any]:
        resident = self._runtime.resident()
        failures = self._runtime.failures()
        engines = self._runtime.engines
        newest = next(reversed(list(failures.values())), None)
        last_error = self._runtime.lost_device or engines.last_error or newest
        feasibility = None if self._live is None else self._live.feasibility
        now = datetime.now(UTC)
        return {
            "ready": self._reason() is None,
            "instance_id": self._instance_id,
            "loaded": sorted(row.model.model_id for row in resident),
            "current_model": self._runtime.current,
            "inflight": self._runtime.lease.snapshot(),
            "loading": self._runtime.loading(),
            "inflight_load_bytes": self._runtime.inflight_load_bytes,
            "resident_models": [_row(row, now) for row in resident],
            "load_errors": failures,
            "default_model": self._readiness.default_model,
            "default_model_error": self._default_error(),
            "ram_feasibility": None if feasibility is None else feasibility.document(),
            "engine_last_error": last_error,
            "engines_failed": engines.retired.num_failed,
            "chat_active": self._runtime.chats.count,
            "http_inflight": self._admission.active,
            "http_inference_limit": self._admission.limit,
        }

    def _reason(self) -> str | None:
        """A supervisor that sees `device_lost` should start another process."""
        return self._readiness.reason or ("device_lost" if self._runtime.lost_device else None)

    def _default_error(self) -> str | None:
        """Why the model of the start is not there, until it has been loaded after all."""
        name = self._readiness.default_model
        if name is None or self._runtime.is_resident(name):
            return None
        return self._readiness.default_error


def _row(row: ResidentModel, now: datetime) -> dict[str, Any]:
    capacity = row.model.engine.capacity_snapshot()
    unload_at: str | None = None
    if row.unload_in_s is not None:
        at = now + timedelta(seconds=row.unload_in_s)
        unload_at = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
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
        "tokens_per_second": capacity.tokens_per_second,
        "last_use_source": row.owner,
        "idle_unload_at": unload_at,
        "idle_seconds_remaining": None if row.unload_in_s is None else math.ceil(row.unload_in_s),
    }
