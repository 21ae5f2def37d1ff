"""One response on its way: from a prepared request to its end, and what the store hears of it.

Whoever reads it, a stream, a plain answer or nobody, iterates `events`. It can be ended from
outside at any time; its reader then finds the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from osaurus.chat.completion import usage_of
from osaurus.chat.service import ChatEngine
from osaurus.chat.stream import ChatStream
from osaurus.errors import OsaurusError
from osaurus.server.apis.responses_request import PreparedResponse
from osaurus.server.apis.responses_store import ResponseStore, StoredResponse
from osaurus.server.apis.responses_wire import ResponseObject, StreamEvent
from osaurus.server.apis.responses_writer import ResponseWriter
from osaurus.server.exchange import Exchange
from osaurus.types.events import Info


class ResponseRun:
    """`cancel_early` ends it while the model is still awaited, where somebody may ask for that."""

    def __init__(
        self,
        chat: ChatEngine,
        prepared: PreparedResponse,
        store: ResponseStore,
        exchange: Exchange,
        *,
        cancel_early: Callable[[], object] | None = None,
    ) -> None:
        self._chat = chat
        self._prepared = prepared
        self._store = store
        self._exchange = exchange
        self._writer = ResponseWriter(prepared.response, prepared.notes)
        self._stop = cancel_early
        self._stored: StoredResponse | None = None
        self._last_events: list[StreamEvent] = []

    @property
    def response(self) -> ResponseObject:
        return self._writer.response

    def keep(self) -> None:
        """Let the store have it now, and from here on in every state."""
        if self.response.store and self._stored is None:
            self._stored = StoredResponse(
                response=self.response,
                before=self._prepared.before,
                own=self._prepared.own,
                cancel=self.cancel,
            )
            self._store.put(self._stored)

    async def events(self, *, is_shown: bool) -> AsyncGenerator[StreamEvent]:
        """To the end, or to an error that `fail` makes an end of. `is_shown`: its reader
        learns the id before the end, so that the store must have it then."""
        try:
            stream = await self._open()
            async with stream:
                self._stop = stream.cancel
                self._writer.use_sampling(stream.params)
                opening = self._writer.opening()
                if is_shown:
                    self.keep()
                self._tell_store()
                for event in opening:
                    yield event
                async for item in stream:
                    if isinstance(item.event, Info):
                        made = self._writer.finish(item.event, item.remarks)
                        self._exchange.note_end([item.event])
                        self._exchange.note_answer(usage_of([item.event]))
                        self.keep()
                    else:
                        self._exchange.note_output(item.event)
                        made = self._writer.take(item.event)
                    self._tell_store()  # before its reader, who may go on from it at once
                    for event in made:
                        yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancel()  # its reader has gone
            raise

    def fail(self, error: OsaurusError) -> list[StreamEvent]:
        """The events of an end by `error`, or those of the end that it already had."""
        if not self._writer.has_ended:
            self._exchange.facts["error"] = error.code
            self._last_events = self._writer.fail(error)
            self._tell_store()
        return self._last_events

    def cancel(self) -> None:
        """End it. What it had said so far is kept."""
        if self._writer.has_ended:
            return
        self._last_events = self._writer.cancel()
        self._tell_store()
        if self._stop is not None:
            self._stop()

    async def _open(self) -> ChatStream:
        with self._prepared.conversation.naming_items():
            return await self._chat.open(self._prepared.chat_request, suppress_progress=True)

    def _tell_store(self) -> None:
        if self._stored is None:
            return
        self._stored.response = self.response
        if self._writer.has_ended:
            self._stored.cancel = None
            self._store.recount(self._stored)
