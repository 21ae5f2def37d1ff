"""`POST /embed` and the older `POST /embeddings` as Ollama has them: texts to vectors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.service import ChatEngine
from osaurus.errors import InvalidField
from osaurus.server.apis.ollama_lines import nanoseconds
from osaurus.server.apis.ollama_names import find_by_name
from osaurus.server.apis.ollama_options import keep_alive_policy
from osaurus.server.apis.openai_wire import encode
from osaurus.server.body import read_json
from osaurus.server.exchange import Exchange
from osaurus.server.limits import Admission
from osaurus.server.paths import style_of
from osaurus.server.sse import run_while_connected
from osaurus.types.chat import Usage
from osaurus.types.embeddings import EmbeddingRequest, Embeddings

_Handler = Callable[[Request], Awaitable[Response]]


class EmbedBody(Struct, kw_only=True):
    """`options` are not read: none of them changes a vector."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: Any = None


class OldEmbedBody(Struct, kw_only=True):
    """`input` tells OpenAI's body from this one."""

    model: str = ""
    prompt: str | None = None
    input: Any = None
    keep_alive: Any = None


class EmbedAnswer(Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int


class OldEmbedAnswer(Struct, kw_only=True):
    embedding: list[float]


class OllamaEmbed:
    """`openai` answers what comes to `/embeddings` and is not Ollama's."""

    def __init__(self, chat: ChatEngine, admission: Admission, openai: _Handler) -> None:
        self._chat = chat
        self._admission = admission
        self._openai = openai

    async def embed(self, request: Request) -> Response:
        started_s = time.monotonic()
        body = await read_json(request, EmbedBody)
        wanted = EmbeddingRequest(
            model=body.model,
            inputs=(body.input,) if isinstance(body.input, str) else tuple(body.input),
            dimensions=body.dimensions,
            truncate=body.truncate is not False,
        )
        found = await self._vectors(request, wanted, body.keep_alive)
        answer = EmbedAnswer(
            model=body.model,
            embeddings=[vector.tolist() for vector in found.vectors],
            total_duration=nanoseconds(time.monotonic() - started_s),
            prompt_eval_count=found.num_tokens,
        )
        # Thousands of vectors take a while to write; other streams go on meanwhile.
        payload = await asyncio.to_thread(encode, answer)
        return Response(payload, media_type="application/json")

    async def embeddings(self, request: Request) -> Response:
        if style_of(request.scope) != "ollama":
            return await self._openai(request)
        body = await read_json(request, OldEmbedBody)
        if body.input is not None:
            return await self._openai(request)
        if body.prompt is None:
            raise InvalidField("prompt", "is required")
        wanted = EmbeddingRequest(model=body.model, inputs=(body.prompt,), truncate=True)
        found = await self._vectors(request, wanted, body.keep_alive)
        answer = OldEmbedAnswer(embedding=found.vectors[0].tolist())
        return Response(encode(answer), media_type="application/json")

    async def _vectors(
        self, request: Request, wanted: EmbeddingRequest, keep_alive: Any
    ) -> Embeddings:
        exchange = Exchange.of(request)
        exchange.facts["model"] = wanted.model[:200]
        policy = keep_alive_policy(keep_alive)
        runtime = self._chat.runtime
        name, _ = await find_by_name(runtime, wanted.model)
        work = self._embed(replace(wanted, model=name))
        found = await run_while_connected(request.receive, work)
        if policy is not None:
            runtime.keep_resident(found.model_id, policy)
        exchange.note_answer(Usage(prompt_tokens=found.num_tokens, completion_tokens=0))
        return found

    async def _embed(self, wanted: EmbeddingRequest) -> Embeddings:
        with self._admission.slot():
            return await self._chat.embed(wanted)
