"""`/responses`: made, streamed, read back, gone on from, cancelled, deleted and compacted.

The handlers decode and encode; what fields mean is in `responses_request.py`, how an answer
becomes items and events in `responses_writer.py`, what is kept in `responses_store.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.service import ChatEngine
from osaurus.errors import InvalidField, OsaurusError
from osaurus.server.apis.responses_compact import compact
from osaurus.server.apis.responses_request import PreparedResponse, prepare_response
from osaurus.server.apis.responses_run import ResponseRun
from osaurus.server.apis.responses_store import ResponseStore, not_cancellable
from osaurus.server.apis.responses_wire import (
    CompactBody,
    DeletedResponse,
    InputTokenCount,
    Item,
    ItemList,
    ResponsesBody,
    StreamEvent,
    encode,
)
from osaurus.server.body import read_json
from osaurus.server.exchange import Exchange
from osaurus.server.limits import Admission
from osaurus.server.sse import DONE, EventStreamResponse, event_frame, run_while_connected

logger = logging.getLogger(__name__)

_DEFAULT_PAGE = 20
_MAX_PAGE = 100


class Responses:
    def __init__(self, chat: ChatEngine, admission: Admission, *, ping_interval_s: float) -> None:
        self._chat = chat
        self._admission = admission
        self._ping_interval_s = ping_interval_s
        self._store = ResponseStore()
        self._detached: set[asyncio.Task[None]] = set()

    async def create(self, request: Request) -> Response | EventStreamResponse:
        exchange = Exchange.of(request)
        body = await read_json(request, ResponsesBody)
        prepared = prepare_response(body, self._store, exchange.request_id)
        exchange.facts["model"] = body.model[:200]
        if body.background:
            return self._begin_detached(prepared, exchange)
        run = ResponseRun(self._chat, prepared, self._store, exchange)
        if not _wants_stream(body, request):
            return await run_while_connected(request.receive, self._answer(run))
        return EventStreamResponse(
            self._frames(run),
            failure_frames=lambda error: _frames_of(run.fail(error)) + DONE,
            ping_interval_s=self._ping_interval_s,
        )

    async def compact(self, request: Request) -> Response:
        exchange = Exchange.of(request)
        body = await read_json(request, CompactBody)
        exchange.facts["model"] = body.model[:200]
        return await run_while_connected(request.receive, self._compacted(body, exchange))

    async def count_input_tokens(self, request: Request) -> Response:
        """Runs and loads nothing."""
        exchange = Exchange.of(request)
        body = await read_json(request, ResponsesBody)
        prepared = prepare_response(body, self._store, exchange.request_id)
        exchange.facts["model"] = body.model[:200]
        with prepared.conversation.naming_items():
            counting = self._chat.count_prompt(prepared.chat_request)
            count = await run_while_connected(request.receive, counting)
        return _json(InputTokenCount(input_tokens=count))

    async def retrieve(self, request: Request) -> Response:
        stored = self._store.get(_id_of(request))
        if request.query_params.get("stream") == "true":
            raise InvalidField("stream", "a stored response is not streamed again; read it whole")
        return _json(stored.response)

    async def delete(self, request: Request) -> Response:
        """A running one is cancelled too."""
        stored = self._store.remove(_id_of(request))
        if stored.cancel is not None:
            stored.cancel()
        return _json(DeletedResponse(id=stored.response.id))

    async def cancel(self, request: Request) -> Response:
        """Of one that is cancelled already: no change."""
        stored = self._store.get(_id_of(request))
        if stored.cancel is not None:
            stored.cancel()
        elif stored.response.status != "cancelled":
            raise not_cancellable(stored)
        return _json(stored.response)

    async def input_items(self, request: Request) -> Response:
        """All that the model was given but for the instructions, in pages."""
        stored = self._store.get(_id_of(request))
        return _json(_page(request, (*stored.before, *stored.own)))

    async def _answer(self, run: ResponseRun) -> Response:
        with self._admission.slot():
            await _read(run, is_shown=False)
        return _json(run.response)

    async def _compacted(self, body: CompactBody, exchange: Exchange) -> Response:
        with self._admission.slot():
            return _json(await compact(self._chat, body, self._store, exchange))

    async def _frames(self, run: ResponseRun) -> AsyncGenerator[bytes]:
        with self._admission.slot():
            async with aclosing(run.events(is_shown=True)) as events:
                async for event in events:
                    yield _frame(event)
            yield DONE

    def _begin_detached(self, prepared: PreparedResponse, exchange: Exchange) -> Response:
        """Its place among the running is taken here, so that a full server says so."""
        with ExitStack() as slot:
            slot.enter_context(self._admission.slot())
            run = ResponseRun(
                self._chat,
                prepared,
                self._store,
                exchange,
                cancel_early=lambda: task.cancel(),
            )
            run.keep()
            task = asyncio.create_task(self._run_detached(run, slot.pop_all()))
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)
        return _json(run.response)

    async def _run_detached(self, run: ResponseRun, slot: ExitStack) -> None:
        with slot:
            try:
                await _read(run, is_shown=True)
            except OsaurusError as error:
                run.fail(error)
            except Exception:
                logger.exception("response %s failed", run.response.id)
                run.fail(OsaurusError("internal error"))


async def _read(run: ResponseRun, *, is_shown: bool) -> None:
    async with aclosing(run.events(is_shown=is_shown)) as events:
        async for _ in events:
            pass


def _wants_stream(body: ResponsesBody, request: Request) -> bool:
    if body.stream is not None:
        return body.stream
    return "text/event-stream" in request.headers.get("accept", "")


def _id_of(request: Request) -> str:
    return request.path_params["response_id"]


def _page(request: Request, items: Sequence[Item]) -> ItemList:
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidField("order", f"must be asc or desc, got {order[:40]!r}")
    limit = query.get("limit", str(_DEFAULT_PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_PAGE):
        raise InvalidField("limit", f"must be at least 1 and at most {_MAX_PAGE}, got {limit[:20]}")
    rows = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        place = next((i for i, item in enumerate(rows) if item["id"] == after), None)
        if place is None:
            raise InvalidField("after", f"no item {after[:80]!r} is among this response's input")
        rows = rows[place + 1 :]
    shown = rows[: int(limit)]
    return ItemList(
        data=shown,
        first_id=shown[0]["id"] if shown else "",
        last_id=shown[-1]["id"] if shown else "",
        has_more=len(rows) > len(shown),
    )


def _frame(event: StreamEvent) -> bytes:
    return event_frame(event.type, encode(event))


def _frames_of(events: Sequence[StreamEvent]) -> bytes:
    return b"".join(map(_frame, events))


def _json(value: Struct) -> Response:
    return Response(encode(value), media_type="application/json")
