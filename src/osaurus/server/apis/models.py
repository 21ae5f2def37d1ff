"""`GET /models` and `GET /models/{id}`: what could be asked for, loaded or not.

Anthropic's clients use the same paths and get their own shape, known by their header or prefix.
"""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.runtime.model import Listing
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.apis.anthropic_models import model_info, model_page
from osaurus.server.apis.anthropic_request import check_version
from osaurus.server.apis.openai_wire import encode
from osaurus.server.paths import protocol_of


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
        if _is_anthropic(request):
            return _json(model_page(listings, request.query_params))
        return _json(WireModelList(data=[_wire(listing) for listing in listings]))

    async def get_model(self, request: Request) -> Response:
        listing = await self._runtime.find(request.path_params["model_id"])
        return _json(model_info(listing) if _is_anthropic(request) else _wire(listing))


def _is_anthropic(request: Request) -> bool:
    if protocol_of(request.scope) != "anthropic":
        return False
    check_version(request.headers.get("anthropic-version"))
    return True


def _wire(listing: Listing) -> WireModel:
    return WireModel(
        id=listing.model_id, created=int(listing.modified.timestamp()), root=listing.model_id
    )


def _json(body: Struct) -> Response:
    return Response(encode(body), media_type="application/json")
