"""`POST /chat` and `POST /generate` as Ollama has them: lines of JSON, streamed unless told
otherwise.

A request without messages or prompt loads the model, or unloads it with `keep_alive` 0.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.completion import fold, usage_of
from osaurus.chat.service import ChatEngine
from osaurus.chat.stream import ChatStream
from osaurus.errors import NoChatTemplate, OsaurusError
from osaurus.server.apis.ollama_lines import LineWriter, Shape
from osaurus.server.apis.ollama_names import find_by_name
from osaurus.server.apis.ollama_options import keep_alive_policy
from osaurus.server.apis.ollama_request import chat_request_of, generate_request_of, untemplated
from osaurus.server.apis.ollama_wire import AnswerBody, ChatBody, GenerateBody, Line
from osaurus.server.apis.openai_wire import encode
from osaurus.server.auth import require_owner
from osaurus.server.body import read_json
from osaurus.server.errors import error_body
from osaurus.server.exchange import Exchange
from osaurus.server.limits import Admission
from osaurus.server.sse import NDJSON, EventStreamResponse, run_while_connected
from osaurus.types.chat import ChatRequest
from osaurus.types.events import Info
from osaurus.types.runtime import ResidencyPolicy


class OllamaChat:
    def __init__(self, chat: ChatEngine, admission: Admission) -> None:
        self._chat = chat
        self._admission = admission

    async def chat(self, request: Request) -> Response | EventStreamResponse:
        body = await read_json(request, ChatBody)
        if not body.messages:
            return await self._load(body, request, "chat")
        return await self._answer(
            body, chat_request_of(body, Exchange.of(request).request_id), request, "chat"
        )

    async def generate(self, request: Request) -> Response | EventStreamResponse:
        body = await read_json(request, GenerateBody)
        if not body.prompt and not body.suffix and not body.images:
            return await self._load(body, request, "generate")
        return await self._answer(
            body, generate_request_of(body, Exchange.of(request).request_id), request, "generate"
        )

    async def _load(self, body: AnswerBody, request: Request, shape: Shape) -> Response:
        policy = keep_alive_policy(body.keep_alive)
        writer = LineWriter(body.model, shape)
        runtime = self._chat.runtime
        name, listing = await find_by_name(runtime, body.model)
        if policy is not None and policy.mode == "immediately":
            require_owner(request)
            runtime.keep_resident(listing.model_id, policy)
            return _json(writer.without_answer("unload"))
        await run_while_connected(request.receive, self._bring_in(name, policy))
        return _json(writer.without_answer("load"))

    async def _bring_in(self, name: str, policy: ResidencyPolicy | None) -> None:
        if self._chat.live is not None:
            await self._chat.live.refresh(self._chat.runtime)
        with self._admission.slot(), await self._chat.runtime.acquire(name) as model:
            model.admit()
            self._keep(model.model_id, policy)

    async def _answer(
        self, body: AnswerBody, chat_request: ChatRequest, request: Request, shape: Shape
    ) -> Response | EventStreamResponse:
        exchange = Exchange.of(request)
        exchange.facts["model"] = body.model[:200]
        policy = keep_alive_policy(body.keep_alive)
        writer = LineWriter(body.model, shape)
        name, _ = await find_by_name(self._chat.runtime, body.model)
        chat_request = replace(chat_request, model=name)
        if body.stream is False:
            answer = self._whole(chat_request, policy, writer, exchange)
            return _json(await run_while_connected(request.receive, answer))
        return EventStreamResponse(
            self._lines(chat_request, policy, writer, exchange),
            failure_frames=_failure_line,
            ping=None,  # every line of this format means something
            media_type=NDJSON,
        )

    async def _whole(
        self,
        chat_request: ChatRequest,
        policy: ResidencyPolicy | None,
        writer: LineWriter,
        exchange: Exchange,
    ) -> Line:
        with self._admission.slot():
            async with await self._open(chat_request) as stream:
                writer.note_loaded()
                self._keep(stream.model_id, policy)
                (choice,) = (await fold(stream)).choices
        exchange.note_answer(usage_of([choice.info]))
        exchange.note_end([choice.info])
        return writer.whole(choice)

    async def _lines(
        self,
        chat_request: ChatRequest,
        policy: ResidencyPolicy | None,
        writer: LineWriter,
        exchange: Exchange,
    ) -> AsyncGenerator[bytes]:
        with self._admission.slot():
            async with await self._open(chat_request) as stream:
                writer.note_loaded()
                self._keep(stream.model_id, policy)
                async for item in stream:
                    if isinstance(item.event, Info):
                        exchange.note_answer(usage_of([item.event]))
                        exchange.note_end([item.event])
                    else:
                        exchange.note_output(item.event)
                    for line in writer.lines(item):
                        yield encode(line) + b"\n"

    async def _open(self, chat_request: ChatRequest) -> ChatStream:
        """A model without a template goes on from a single prompt as it stands, as under Ollama."""
        try:
            return await self._chat.open(chat_request, suppress_progress=True)
        except NoChatTemplate:
            prompt = untemplated(chat_request)
            if prompt is None:
                raise
            return await self._chat.open(prompt, suppress_progress=True)

    def _keep(self, model_id: str, policy: ResidencyPolicy | None) -> None:
        """From here on, until the model is unloaded or another request says otherwise."""
        if policy is not None:
            self._chat.runtime.keep_resident(model_id, policy)


def _json(line: Line) -> Response:
    return Response(encode(line), media_type="application/json")


def _failure_line(error: OsaurusError) -> bytes:
    return error_body(error, "ollama") + b"\n"
