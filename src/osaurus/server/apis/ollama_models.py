"""Ollama's list, show, ps, version and delete, and what of Ollama is not served.

Everything said of a model is read from its files, cheaply enough to be asked for often; nothing
here loads one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import NoReturn

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from osaurus import __version__
from osaurus.bundle.card import card_of
from osaurus.bundle.removal import check_owned, remove_model
from osaurus.errors import InvalidField
from osaurus.runtime.blocking import on_thread
from osaurus.runtime.model import Listing
from osaurus.runtime.pool import ModelRuntime, ResidentModel
from osaurus.server.apis.ollama_lines import timestamp
from osaurus.server.apis.ollama_names import find_by_name
from osaurus.server.apis.ollama_show import Details, details_of, show
from osaurus.server.apis.openai_wire import encode
from osaurus.server.auth import require_owner
from osaurus.server.body import read_json
from osaurus.server.errors import RequestRefused
from osaurus.settings.places import configured_models_dir

#: The Ollama whose protocol this is. Clients refuse what they take for too old: VS Code wants
#: 0.6.4, Codex 0.13.4, some agents 0.14.2.
OLLAMA_VERSION = "0.15.0"

#: Clients want a time, also for a model that stays.
_FOR_EVER = timedelta(days=36500)


class ModelName(Struct, kw_only=True):
    """`name` is what `model` was called at first."""

    model: str | None = None
    name: str | None = None

    @property
    def given(self) -> str:
        name = self.model if self.model is not None else self.name
        if name is None:
            raise InvalidField("model", "is required")
        return name


class ListedModel(Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels:
    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime = runtime

    async def banner(self, request: Request) -> Response:
        """What clients look for at the root to know that a server is there."""
        return PlainTextResponse("Ollama is running")

    async def version(self, request: Request) -> Response:
        return _json({"version": OLLAMA_VERSION, "osaurus": __version__})

    async def tags(self, request: Request) -> Response:
        listings = await self._runtime.catalog()
        return _json({"models": await on_thread(lambda: [*map(_listed, listings)])})

    async def ps(self, request: Request) -> Response:
        rows = self._runtime.resident()
        listings = [await self._runtime.find(row.model.model_id) for row in rows]
        now = datetime.now(UTC)
        return _json(
            {
                "models": await on_thread(
                    lambda: [
                        _running(_listed(listing), row, now)
                        for listing, row in zip(listings, rows, strict=True)
                    ]
                )
            }
        )

    async def show(self, request: Request) -> Response:
        wanted = await read_json(request, ModelName)
        _, listing = await find_by_name(self._runtime, wanted.given)
        resident = {row.model.model_id: row.model for row in self._runtime.resident()}
        loaded = resident.get(listing.model_id)
        context = loaded.context_tokens if loaded else None
        return _json(await on_thread(lambda: show(listing, context_tokens=context)))

    async def delete(self, request: Request) -> Response:
        """Unload it, then delete its files in the models directory."""
        require_owner(request)
        wanted = await read_json(request, ModelName)
        _, listing = await find_by_name(self._runtime, wanted.given)
        folder = configured_models_dir().path
        check_owned(listing.model_id, listing.path, folder)
        await self._runtime.unload(listing.model_id)
        await on_thread(lambda: remove_model(listing.model_id, listing.path, folder))
        return Response(status_code=200)


def refusal(what: str, instead: str) -> Callable[[Request], Awaitable[NoReturn]]:
    """A handler for a part of Ollama that is not served."""

    async def refuse(request: Request) -> NoReturn:
        raise RequestRefused("unsupported_endpoint", f"{what} is not supported; {instead}")

    return refuse


def _listed(listing: Listing) -> ListedModel:
    card = card_of(listing.model_id, listing.path)
    return ListedModel(
        name=listing.model_id,
        model=listing.model_id,
        modified_at=timestamp(listing.modified),
        size=listing.size_bytes,
        digest=card.digest,
        details=details_of(card),
    )


def _running(model: ListedModel, row: ResidentModel, now: datetime) -> ListedModel:
    left_s = row.unload_in_s if row.unload_in_s is not None else row.policy.delay_s
    model.modified_at = UNSET
    model.size = row.model.size_bytes
    model.size_vram = 0 if row.model.device == "cpu" else row.model.size_bytes
    model.expires_at = timestamp(now + (_FOR_EVER if left_s is None else timedelta(seconds=left_s)))
    model.context_length = row.model.context_tokens
    return model


def _json(body: object) -> Response:
    return Response(encode(body), media_type="application/json")
