"""Whether a request comes from this machine: what may see and change the server itself.

A proxy on this machine speaks for others, and says so by a forwarding header.
"""

from __future__ import annotations

from starlette.requests import Request

from osaurus.server.errors import RequestRefused
from osaurus.server.origins import is_loopback

_FORWARDING = ("forwarded", "x-real-ip", "x-osaurus-relay")
_FORWARDING_PREFIX = "x-forwarded-"


def is_local(request: Request) -> bool:
    if request.client is None or not is_loopback(request.client.host):
        return False
    return not any(
        name in _FORWARDING or name.startswith(_FORWARDING_PREFIX) for name in request.headers
    )


def require_local(request: Request) -> None:
    """Raises `RequestRefused` (403). Foreign web pages were refused before (`origins.py`)."""
    if not is_local(request):
        raise RequestRefused("local_only", "this path answers programs of this machine only")
