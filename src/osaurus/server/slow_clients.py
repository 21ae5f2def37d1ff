"""How long a client may take to say what it wants, and to take what it is given.

A connection whose request head is not there in time is closed; a body that comes too slowly is
a 408; a client that takes nothing of its answer for long is taken for gone, so that it cannot
keep a model's slot by standing still.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import Message, Receive, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from osaurus.errors import Cancelled
from osaurus.server.errors import RequestRefused

#: From the first byte of a connection, or of a further request on it, to the end of the head.
HEAD_TIMEOUT_S = 30.0
#: Between two pieces of a body, and for all of it.
BODY_PAUSE_S = 30.0
BODY_TIMEOUT_S = 300.0
#: For one piece of an answer to fit into the buffers on the way to the client.
WRITE_TIMEOUT_S = 120.0


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which by itself waits for a request's head for ever."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_deadline()
        elif self._head_deadline is None and not self.transport.is_closing():
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_deadline = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _forget_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


def patient_body(
    receive: Receive, *, pause_s: float = BODY_PAUSE_S, total_s: float = BODY_TIMEOUT_S
) -> Receive:
    """A `receive` that raises `RequestRefused` (408) when the body takes too long. Once it is
    whole, waiting for the client to go away has no limit."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + total_s
    is_whole = False

    async def limited_receive() -> Message:
        nonlocal is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(min(loop.time() + pause_s, deadline)):
                message = await receive()
        except TimeoutError:
            raise RequestRefused(
                "request_incomplete",
                f"the body did not arrive: at most {pause_s:g} s may pass between two pieces of "
                f"it and {total_s:g} s in all",
                {"connection": "close"},
            ) from None
        is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return limited_receive


def impatient_send(send: Send, *, timeout_s: float = WRITE_TIMEOUT_S) -> Send:
    """A `send` that raises `Cancelled` when the client takes nothing for so long."""

    async def limited_send(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError:
            raise Cancelled(f"the client took nothing of its answer for {timeout_s:g} s") from None

    return limited_send
