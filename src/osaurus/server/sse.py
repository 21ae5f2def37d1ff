"""Streamed answers (server-sent events, lines of JSON), and knowing when the client has gone.

A stream's headers go out with its first frame, so that a failure before it still has a status
of its own; a silence longer than the ping interval starts the response too, since proxies give
up on a silent one. A client that closes cancels the work at once, streamed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from osaurus.errors import Cancelled, OsaurusError

_T = TypeVar("_T")

PING_INTERVAL_S = 15.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

EVENT_STREAM = "text/event-stream; charset=utf-8"
NDJSON = "application/x-ndjson"

_HEADERS = [
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


def data_frame(payload: bytes) -> bytes:
    """One event. `payload` is JSON, which holds no line break."""
    return b"data: %b\n\n" % payload


def event_frame(event: str, payload: bytes) -> bytes:
    """One event with a name. `payload` as above."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), payload)


class EventStreamResponse:
    """An ASGI response that sends `frames` as they come.

    An `OsaurusError` from `frames` before the first one is raised to the caller; after it,
    `failure_frames` says what the client gets, and the response ends in order. `ping` fills
    a silence; None where the format has nothing that a client would skip.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes],
        *,
        failure_frames: Callable[[OsaurusError], bytes],
        ping_interval_s: float = PING_INTERVAL_S,
        ping: bytes | None = PING,
        media_type: str = EVENT_STREAM,
    ) -> None:
        self._frames = frames
        self._failure_frames = failure_frames
        self._ping_interval_s = ping_interval_s
        self._ping = ping
        self._headers = [(b"content-type", media_type.encode()), *_HEADERS]
        self._writing = asyncio.Lock()  # a ping must not fall into a frame that is being sent
        self._is_started = False
        self._last_write_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_write_s = asyncio.get_running_loop().time()
        if self._ping is None:
            await run_while_connected(receive, self._send_frames(send))
            return
        pings = asyncio.create_task(self._keep_alive(send, self._ping))
        try:
            await run_while_connected(receive, self._send_frames(send))
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)

    async def _send_frames(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await self._write(send, frame)
        except OsaurusError as error:
            if not self._is_started:
                raise
            await self._write(send, self._failure_frames(error))
        except Exception:
            if self._is_started:
                await self._write(send, self._failure_frames(OsaurusError("internal error")))
                await self._write(send, b"", is_last=True)
            raise
        await self._write(send, b"", is_last=True)

    async def _keep_alive(self, send: Send, ping: bytes) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._last_write_s + self._ping_interval_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self._write(send, ping)

    async def _write(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        async with self._writing:
            if not self._is_started:
                self._is_started = True
                await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._last_write_s = asyncio.get_running_loop().time()


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the client closes the connection.

    The request's body must have been read. Raises `Cancelled` when the client went first,
    after `work` has let go of everything.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
