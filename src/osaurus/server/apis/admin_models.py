"""`POST /admin/preload` and `POST /admin/unload`: models come and go by hand.

For programs of this machine. Neither touches files.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.runtime.pool import ModelRuntime
from osaurus.server.auth import require_owner
from osaurus.server.body import read_json
from osaurus.types.runtime import ModelUse


class PreloadBody(Struct, kw_only=True):
    model: str


class UnloadBody(Struct, kw_only=True):
    model: str | None = None


class ModelAdmin:
    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime = runtime

    async def preload(self, request: Request) -> Response:
        """Answers when the model is there."""
        require_owner(request)
        wanted = await read_json(request, PreloadBody)
        with await self._runtime.acquire(wanted.model, use=ModelUse(by_hand=True)) as model:
            return _json({"status": "ok", "loaded": model.model_id})

    async def unload(self, request: Request) -> Response:
        """Of `model`, or of every one without a body. Answers when the memory is given back;
        streams that run end first."""
        require_owner(request)
        wanted = UnloadBody()
        if (await request.body()).strip():
            wanted = await read_json(request, UnloadBody)
        if wanted.model is None:
            names = sorted(row.model.model_id for row in self._runtime.resident())
            await self._runtime.clear_all(by_hand=True)
            return _json({"status": "ok", "unloaded": names})
        model_id = (await self._runtime.find(wanted.model)).model_id
        was_there = await self._runtime.unload(wanted.model)
        return _json({"status": "ok", "unloaded": [model_id] if was_there else []})


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
