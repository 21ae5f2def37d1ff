"""`GET /models` and `GET /models/{id}`: what could be asked for, loaded or not."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.runtime.model import Listing
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.apis.openai_wire import encode


class WireModel(Struct, kw_only=True):
    id: str
    created: int
    root: str
    object: str = "model"
    owned_by: str = "osaurus"


class WireModelList(Struct, kw_only=True):
    data: list[WireModel]
    object: str = "list"


class ModelCatalog:
    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime = runtime

    async def list_models(self, request: Request) -> Response:
        listings = await self._runtime.catalog()
        return _json(WireModelList(data=[_wire(listing) for listing in listings]))

    async def get_model(self, request: Request) -> Response:
        return _json(_wire(await self._runtime.find(request.path_params["model_id"])))


def _wire(listing: Listing) -> WireModel:
    return WireModel(
        id=listing.model_id, created=int(listing.modified.timestamp()), root=listing.model_id
    )


def _json(body: Struct) -> Response:
    return Response(encode(body), media_type="application/json")
