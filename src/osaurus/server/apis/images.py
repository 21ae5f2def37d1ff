"""Endpoints for pictures and sound: refused with the reason, after everything that guards the
others. Never a 404, never a text model's answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

from starlette.requests import Request

from osaurus.server.errors import RequestRefused

#: Path -> what it would take.
UNSUPPORTED = {
    "/images/generations": "makes pictures",
    "/images/edits": "makes pictures",
    "/images/variations": "makes pictures",
    "/audio/speech": "makes speech",
    "/audio/transcriptions": "hears speech",
    "/audio/translations": "hears speech",
}


def unsupported(needs: str) -> Callable[[Request], Awaitable[NoReturn]]:
    """A handler that reads no body: whatever the request says, the answer is the same."""

    async def refuse(request: Request) -> NoReturn:
        raise RequestRefused(
            "unsupported_endpoint",
            f"{request.scope['path']} is not supported: osaurus runs no model that {needs}",
        )

    return refuse
