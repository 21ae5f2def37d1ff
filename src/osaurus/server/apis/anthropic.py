"""`POST /messages`, plain and streamed, and `POST /messages/count_tokens`.

The handler decodes, opens the stream, and encodes; what the fields mean is in
`anthropic_request.py`, how the answer looks in `anthropic_events.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.completion import usage_of
from osaurus.chat.service import ChatEngine
from osaurus.errors import InvalidField, OsaurusError
from osaurus.server.apis.anthropic_events import MessageWriter, whole_message
from osaurus.server.apis.anthropic_request import MessagesRequest, check_version, to_chat_request
from osaurus.server.apis.anthropic_signature import ThinkingSigner
from osaurus.server.apis.anthropic_wire import (
    MessagesBody,
    Ping,
    StreamEvent,
    TokenCount,
    encode,
    event_name,
)
from osaurus.server.body import read_json
from osaurus.server.errors import error_body
from osaurus.server.exchange import Exchange
from osaurus.server.limits import Admission
from osaurus.server.sse import EventStreamResponse, event_frame, run_while_connected
from osaurus.types.events import Info, PrefillProgress

_T = TypeVar("_T")


class AnthropicMessages:
    def __init__(
        self,
        chat: ChatEngine,
        admission: Admission,
        signer: ThinkingSigner,
        *,
        ping_interval_s: float,
    ) -> None:
        self._chat = chat
        self._admission = admission
        self._signer = signer
        self._ping_interval_s = ping_interval_s

    async def messages(self, request: Request) -> Response | EventStreamResponse:
        exchange = Exchange.of(request)
        check_version(request.headers.get("anthropic-version"))
        body = await read_json(request, MessagesBody)
        wanted = to_chat_request(body, exchange.request_id)
        exchange.facts["model"] = body.model[:200]
        events = self._events(wanted, exchange, is_streamed=bool(body.stream))
        if not body.stream:
            return await run_while_connected(request.receive, _answer(events))
        return EventStreamResponse(
            _frames(events),
            failure_frames=_failure_frame,
            ping_interval_s=self._ping_interval_s,
            ping=_frame(Ping()),
        )

    async def count_tokens(self, request: Request) -> Response:
        exchange = Exchange.of(request)
        check_version(request.headers.get("anthropic-version"))
        body = await read_json(request, MessagesBody)
        wanted = to_chat_request(body, exchange.request_id, is_count=True)
        exchange.facts["model"] = body.model[:200]
        counting = _named(wanted, self._chat.count_prompt(wanted.chat))
        count = await run_while_connected(request.receive, counting)
        exchange.facts["prompt"] = count
        return _json(TokenCount(input_tokens=count))

    async def _events(
        self, wanted: MessagesRequest, exchange: Exchange, *, is_streamed: bool
    ) -> AsyncGenerator[StreamEvent]:
        """Nothing comes before the first output: what fails until then has a status."""
        writer = MessageWriter(
            wanted.chat.model,
            begin_signature=self._signer.begin,
            shows_thinking=wanted.shows_thinking,
            stop_sequences=wanted.chat.sampling.get("stop", ()),
            notes=wanted.notes,
        )
        with self._admission.slot():
            async with await _named(wanted, self._chat.open(wanted.chat)) as stream:
                cached: int | None = None
                is_open = False
                async for item in stream:
                    event = item.event
                    if isinstance(event, PrefillProgress):
                        if event.stage == "cache_lookup" and cached is None:
                            cached = event.completed
                        continue
                    if not is_open:
                        is_open = True
                        if isinstance(event, Info):
                            cached = event.cached_prompt_tokens
                        for each in writer.opening(stream.prompt_tokens, cached or 0):
                            yield each
                    if isinstance(event, Info):
                        exchange.note_answer(usage_of([event]))
                        exchange.note_end([event])
                    elif is_streamed:
                        exchange.note_output(event)
                    for each in writer.events(event, item.remarks):
                        yield each


async def _answer(events: AsyncGenerator[StreamEvent]) -> Response:
    async with aclosing(events):
        return _json(whole_message([event async for event in events]))


async def _frames(events: AsyncGenerator[StreamEvent]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for event in events:
            yield _frame(event)


async def _named(wanted: MessagesRequest, work: Awaitable[_T]) -> _T:
    """What `work` gives; a fault that it finds names the request's own field."""
    try:
        return await work
    except InvalidField as error:
        raise wanted.renamed(error) from error


def _frame(event: StreamEvent) -> bytes:
    return event_frame(event_name(event), encode(event))


def _failure_frame(error: OsaurusError) -> bytes:
    return event_frame("error", error_body(error, "anthropic"))


def _json(body: Struct) -> Response:
    return Response(encode(body), media_type="application/json")
