"""How much one request may take before anything looks at what it says.

Sizes of headers and body, depth of JSON, number of requests at once. All of them are refused
with the limit in the message, as early as they can be seen.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from starlette.types import Message, Receive, Scope

from osaurus.errors import (
    InvalidField,
    PayloadTooLarge,
    RateLimited,
    ServerOverloaded,
    UserError,
)
from osaurus.server.errors import RequestRefused

MAX_HEADERS = 200
MAX_HEADER_BYTES = 1024 * 1024
MAX_JSON_DEPTH = 256
_MINUTE_S = 60.0

#: Strings are skipped whole, so that brackets in them do not count. One that never ends is
#: skipped too, and nothing is tried twice: what is no JSON must not cost more than what is.
_JSON_MARKS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def check_headers(scope: Scope) -> None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS:
        raise RequestRefused(
            "headers_too_large", f"{len(headers)} headers; the limit is {MAX_HEADERS}"
        )
    if size > MAX_HEADER_BYTES:
        raise RequestRefused(
            "headers_too_large", f"{size} bytes of headers; the limit is {MAX_HEADER_BYTES}"
        )


def bounded_body(scope: Scope, receive: Receive, max_bytes: int) -> Receive:
    """A `receive` that raises `PayloadTooLarge` once more than `max_bytes` came.

    A declared length beyond the limit is refused here, before a byte of the body is read.
    """
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    if declared is not None:
        if not declared.isdigit():
            raise UserError("the Content-Length header is not a number")
        if int(declared) > max_bytes:
            raise _too_large(int(declared), max_bytes)
    received = 0

    async def counting_receive() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise _too_large(received, max_bytes)
        return message

    return counting_receive


def _too_large(size: int, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the request body holds at least {size} bytes; the limit is {limit} "
        f"({limit // (1024 * 1024)} MiB)"
    )


def check_json_depth(body: bytes) -> None:
    """Raises `InvalidField` for JSON nested deeper than `MAX_JSON_DEPTH`."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for mark in _JSON_MARKS.finditer(body):
        first = body[mark.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise InvalidField("body", f"is nested deeper than {MAX_JSON_DEPTH} levels")
        elif first in b"]}":
            depth -= 1


class Admission:
    """Counts the inference requests in flight and those of the last minute; one event loop owns
    it. `limit` and `per_minute`, None for any number, are asked each time: they follow settings."""

    def __init__(
        self,
        limit: Callable[[], int],
        *,
        per_minute: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._per_minute = per_minute
        self._clock = clock
        self._begun: deque[float] = deque()  # when those of the last minute did
        self.active = 0

    @property
    def limit(self) -> int:
        return self._limit()

    @contextmanager
    def slot(self) -> Generator[None]:
        """Raises `ServerOverloaded` when `limit` requests are running or waiting, `RateLimited`
        when as many as may began in the last minute."""
        self._check_rate()
        if self.active >= self.limit:
            raise ServerOverloaded(
                f"{self.active} requests are running or waiting; the limit is {self.limit}; "
                "try again in a second"
            )
        self.active += 1
        self._begun.append(self._clock())
        try:
            yield
        finally:
            self.active -= 1

    def _check_rate(self) -> None:
        now, allowed = self._clock(), self._per_minute()
        while self._begun and self._begun[0] <= now - _MINUTE_S:
            self._begun.popleft()
        if allowed is None or len(self._begun) < allowed:
            return
        # The one whose end of a minute makes room.
        wait_s = math.ceil(self._begun[len(self._begun) - allowed] + _MINUTE_S - now)
        raise RateLimited(
            f"{len(self._begun)} requests in the last minute; network.rateLimitRequestsPerMinute "
            f"allows {allowed}; try again in {wait_s} s",
            retry_after_s=max(1, wait_s),
        )
