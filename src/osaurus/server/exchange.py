"""One request and its response: the id, the headers that every answer carries, the log line.

Never logs a body. A handler adds figures through `facts` and the `note_` methods.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import Message, Scope, Send

from osaurus.server.logs import FACTS, HEAD, printable
from osaurus.types.chat import Usage
from osaurus.types.events import Info, PrefillProgress, RuntimeEvent

logger = logging.getLogger("osaurus.server.requests")

_SCOPE_KEY = "osaurus.exchange"
_CLIENT_GONE = 499


class Exchange:
    """Wraps one request's `send`. `status` is what went over the wire, None before that."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.request_id = f"req_{secrets.token_hex(12)}"
        #: OpenAI's name for the id and Anthropic's.
        names = (b"x-request-id", b"request-id")
        self.headers = [(name, self.request_id.encode()) for name in names]
        self.facts: dict[str, str | int | float] = {}
        self.status: int | None = None
        self._method: str = scope["method"]
        self._path: str = scope["path"]
        self._send = send
        self._started_s = time.monotonic()
        scope[_SCOPE_KEY] = self

    @staticmethod
    def of(request: Request) -> Exchange:
        return request.scope[_SCOPE_KEY]

    @property
    def is_started(self) -> bool:
        return self.status is not None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
        await self._send(message)

    def note_gone(self) -> None:
        """The client closed before the answer was whole."""
        self.status = _CLIENT_GONE

    def note_output(self, event: RuntimeEvent) -> None:
        if not isinstance(event, PrefillProgress) and "ttft_ms" not in self.facts:
            self.facts["ttft_ms"] = self._elapsed_ms()

    def note_answer(self, usage: Usage) -> None:
        self.facts["prompt"] = usage.prompt_tokens
        self.facts["cached"] = usage.cached_tokens
        self.facts["completion"] = usage.completion_tokens

    def note_end(self, infos: Sequence[Info]) -> None:
        self.facts["finish"] = ",".join(sorted({info.stop_reason for info in infos}))
        rate = sum(info.tokens_per_second for info in infos)
        if rate > 0:
            self.facts["tok_per_s"] = round(rate, 1)

    def log(self) -> None:
        head = {
            "method": self._method,
            "path": printable(self._path[:200]),
            "status": self.status if self.status is not None else "-",
            "ms": self._elapsed_ms(),
        }
        facts = {"id": self.request_id, **self.facts}
        logger.info(
            "%(method)s %(path)s %(status)s in %(ms)d ms", head, extra={HEAD: head, FACTS: facts}
        )

    def _elapsed_ms(self) -> int:
        return round(1000 * (time.monotonic() - self._started_s))
