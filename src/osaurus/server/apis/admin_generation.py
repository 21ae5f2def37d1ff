"""`GET /admin/generation-settings`: with which settings each model was asked last, and how that
went.

Counts and times only: no text, no token of any prompt. For programs of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.records import GenerationRecords, LastRequest, Stage
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.apis.openai_wire import encode
from osaurus.server.auth import require_owner


class ModelGeneration(Struct, kw_only=True):
    """`stage` and `effective` are null for a model that was loaded and not asked yet."""

    name: str
    is_loaded: bool
    bundle_defaults: Mapping[str, float] | None
    stage: Stage | None
    effective: Mapping[str, Any] | None
    last_request: LastRequest | None


class GenerationSettings(Struct, kw_only=True):
    timestamp: str
    models: list[ModelGeneration]
    status: str = "ok"


class GenerationAdmin:
    def __init__(self, runtime: ModelRuntime, records: GenerationRecords) -> None:
        self._runtime = runtime
        self._records = records

    async def generation_settings(self, request: Request) -> Response:
        """Loaded models first, the one used last before all; then those that went or wait."""
        require_owner(request)
        writers = [row.model for row in self._runtime.resident() if row.model.embedder is None]
        loaded = {model.model_id: model.sampling_defaults for model in writers}
        names = [*loaded, *sorted(name for name in self._records if name not in loaded)]
        answer = GenerationSettings(
            timestamp=datetime.now(UTC).isoformat(timespec="milliseconds"),
            models=[self._row(name, loaded.get(name)) for name in names],
        )
        return Response(encode(answer), media_type="application/json")

    def _row(self, name: str, defaults: Mapping[str, float] | None) -> ModelGeneration:
        record = self._records.get(name)
        if defaults is None and record is not None:
            defaults = record.bundle_defaults
        return ModelGeneration(
            name=name,
            is_loaded=self._runtime.is_resident(name),
            bundle_defaults=defaults,
            stage=None if record is None else record.stage,
            effective=None if record is None else record.effective,
            last_request=None if record is None else record.last_request,
        )
