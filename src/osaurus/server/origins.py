"""Who may speak to this server by way of a browser: Host and Origin checks, and CORS.

Without them any web page could drive a server on the user's machine, by a foreign Origin or by
a DNS name that it points at 127.0.0.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from osaurus.server.errors import RequestRefused
from osaurus.server.paths import normalize

_Headers = list[tuple[bytes, bytes]]

#: RFC 7230 tokens, separated by commas: all that a preflight may ask to have reflected.
_TOKEN_LIST = re.compile(
    r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*"
)
_PREFLIGHT_MAX_AGE_S = 600
_FOREIGN_KEY = "osaurus.foreign_page"


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginPolicy:
    """`bound_host` is where the server listens. `allowed_hosts` are further names it goes by,
    `cors_origins` the foreign origins that may call it (`*` for all)."""

    bound_host: str
    allowed_hosts: Collection[str] = ()
    cors_origins: Collection[str] = ()

    def check(self, scope: Scope) -> _Headers:
        """The CORS headers for the response; raises `RequestRefused` (403) for a Host or
        Origin that is not let in."""
        host = _header(scope, b"host")
        if not self._is_our_name(_host_name(host)):
            raise RequestRefused(
                "forbidden_host",
                f"the Host header {host[:100]!r} is no name of this server; "
                "add it to the allowed hosts if it should be",
            )
        origin = _header(scope, b"origin")
        if not origin:
            return []
        if self._allows(origin, is_guarded=_is_guarded(scope)):
            scope[_FOREIGN_KEY] = not self._is_known(origin)
            return [(b"access-control-allow-origin", self._echo(origin)), (b"vary", b"Origin")]
        if scope["method"] == "GET" and not _is_guarded(scope):
            return []  # without CORS headers the page cannot read the answer
        raise RequestRefused(
            "forbidden_origin",
            f"the Origin {origin[:100]!r} may not call this server; "
            "add it to the CORS origins if it should",
        )

    def _is_our_name(self, name: str) -> bool:
        if not name:
            return False
        if name in {allowed.lower() for allowed in self.allowed_hosts} or is_loopback(name):
            return True
        return not is_loopback(self.bound_host) and _is_address(name)

    def _allows(self, origin: str, *, is_guarded: bool) -> bool:
        if any(char in origin for char in "\r\n"):
            return False
        return self._is_known(origin) or ("*" in self.cors_origins and not is_guarded)

    def _is_known(self, origin: str) -> bool:
        return is_loopback(_origin_host(origin)) or origin in self.cors_origins

    def _echo(self, origin: str) -> bytes:
        if "*" in self.cors_origins and origin not in self.cors_origins:
            return b"*"
        return origin.encode("latin-1")


def is_foreign_page(scope: Scope) -> bool:
    """Whether a page asks that only `*` lets in: it may use the server and not change it."""
    return scope.get(_FOREIGN_KEY, False)


def preflight_headers(scope: Scope) -> _Headers | None:
    """What a preflight is answered with beside the CORS headers; None when it is none."""
    method = _header(scope, b"access-control-request-method")
    if scope["method"] != "OPTIONS" or not method:
        return None
    headers = [(b"access-control-max-age", str(_PREFLIGHT_MAX_AGE_S).encode())]
    asked = _header(scope, b"access-control-request-headers")
    for name, value in (("methods", method), ("headers", asked)):
        if _TOKEN_LIST.fullmatch(value):
            headers.append((f"access-control-allow-{name}".encode(), value.encode()))
    if _header(scope, b"access-control-request-private-network") == "true":
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers


def is_loopback(name: str) -> bool:
    """`localhost`, `*.localhost`, 127.0.0.0/8 or ::1; brackets of a URL do not matter."""
    name = name.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_guarded(scope: Scope) -> bool:
    """Changes of the server itself and of its models' files never come from a foreign page, even
    with `*`."""
    path = normalize(scope["path"]).path  # `/v1/admin` is the same place
    is_admin = path in ("/admin", "/pull", "/delete") or path.startswith("/admin/")
    return scope["method"] == "PUT" or is_admin


def _origin_host(origin: str) -> str:
    """Empty for what is no address."""
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """`name:port` or `[v6]:port` without the port, in lower case."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower().rstrip(".")


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
