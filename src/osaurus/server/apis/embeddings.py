"""`POST /embeddings` in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.service import ChatEngine
from osaurus.errors import InvalidField
from osaurus.server.apis.openai_completions_request import contents_of
from osaurus.server.apis.openai_wire import encode
from osaurus.server.body import read_json
from osaurus.server.exchange import Exchange
from osaurus.server.limits import Admission
from osaurus.server.sse import run_while_connected
from osaurus.types.chat import Usage
from osaurus.types.embeddings import EmbeddingRequest, Embeddings

#: Numbers of an answer that are written on the event loop; more are written beside it.
_INLINE_NUMBERS = 50_000


class EmbeddingsBody(Struct, kw_only=True):
    """`truncate` is ours: cut what is too long instead of refusing it."""

    model: str
    input: Any
    encoding_format: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None


class WireEmbedding(Struct, kw_only=True):
    index: int
    embedding: str | list[float]
    object: str = "embedding"


class EmbeddingUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    data: list[WireEmbedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class OpenAIEmbeddings:
    def __init__(self, chat: ChatEngine, admission: Admission) -> None:
        self._chat = chat
        self._admission = admission

    async def embeddings(self, request: Request) -> Response:
        exchange = Exchange.of(request)
        body = await read_json(request, EmbeddingsBody)
        exchange.facts["model"] = body.model[:200]
        wanted = EmbeddingRequest(
            model=body.model,
            inputs=_inputs(body.input),
            dimensions=body.dimensions,
            truncate=bool(body.truncate),
        )
        as_text = _is_base64(body.encoding_format)
        found = await run_while_connected(request.receive, self._embed(wanted))
        exchange.note_answer(Usage(prompt_tokens=found.num_tokens, completion_tokens=0))
        size = len(found.vectors) * len(found.vectors[0])
        if size > _INLINE_NUMBERS:
            payload = await asyncio.to_thread(_encoded, found, body.model, as_text)
        else:
            payload = _encoded(found, body.model, as_text)
        return Response(payload, media_type="application/json")

    async def _embed(self, wanted: EmbeddingRequest) -> Embeddings:
        with self._admission.slot():
            return await self._chat.embed(wanted)


def _inputs(given: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise InvalidField("input", "must be a text, a list of token ids, or a list of those")
    return tuple(contents_of(given, "input"))


def _is_base64(encoding_format: str | None) -> bool:
    if encoding_format not in (None, "float", "base64"):
        raise InvalidField(
            "encoding_format", f"must be float or base64, got {encoding_format[:40]!r}"
        )
    return encoding_format == "base64"


def _encoded(found: Embeddings, model: str, as_text: bool) -> bytes:
    return encode(
        EmbeddingList(
            data=[
                WireEmbedding(index=i, embedding=_wire(vector, as_text))
                for i, vector in enumerate(found.vectors)
            ],
            model=model,
            usage=EmbeddingUsage(prompt_tokens=found.num_tokens, total_tokens=found.num_tokens),
        )
    )


def _wire(vector: array[float], as_text: bool) -> str | list[float]:
    """float32 in base64 is little-endian, as every machine is that this runs on."""
    return base64.b64encode(vector.tobytes()).decode() if as_text else list(vector)
