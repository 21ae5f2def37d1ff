"""Who is let in: programs of this machine, and whoever has a key.

    local, trusted, speaks for itself      -> owner
    a valid key                            -> owner
    no keys at all on an exposed server    -> guest: everything but the server's own settings
    anybody else                           -> 401, before the body is read, unknown paths too

Open to all: `/` and `/health`, which tells a stranger no more than that it is up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.types import Scope

from osaurus.server.errors import RequestRefused
from osaurus.server.origins import is_foreign_page, is_loopback
from osaurus.server.paths import normalize
from osaurus.settings.keys import KeyRing, Verdict, judge

Caller = Literal["owner", "guest", "stranger"]

_OPEN_PATHS = frozenset({"/", "/health", "/health/ready"})
_CALLER_KEY = "osaurus.caller"

#: A proxy on this machine speaks for others, and says so by one of these.
_FORWARDING = frozenset({b"forwarded", b"x-real-ip", b"x-osaurus-relay"})
_FORWARDING_PREFIX = b"x-forwarded-"

_CHALLENGE = {"www-authenticate": 'Bearer realm="osaurus"'}
_REFUSALS: dict[Verdict, str] = {
    "unknown": "the API key is not valid",
    "expired": "the API key has expired",
    "revoked": "the API key was revoked",
}


def _nothing_configured() -> str | None:
    return None


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyGuard:
    """`keys` are those of the file, `configured` gives the sealed `network.apiKey`. `is_open`:
    the operator said that strangers may come in while there is no key."""

    keys: KeyRing | None = None
    configured: Callable[[], str | None] = _nothing_configured
    trusts_loopback: Callable[[], bool] = _always
    is_open: bool = False

    def admit(self, scope: Scope) -> None:
        """Settle who is calling, for `caller_of`. Raises `RequestRefused` (401), and
        `SettingsFileError` where the keys cannot be read."""
        scope[_CALLER_KEY] = self._caller(scope)

    @property
    def has_keys(self) -> bool:
        return bool(self.keys is not None and self.keys.keys) or self.configured() is not None

    def _caller(self, scope: Scope) -> Caller:
        if _is_local(scope) and self.trusts_loopback():
            return "owner"
        is_open_path = normalize(scope["path"]).path in _OPEN_PATHS
        given = _credential(scope)
        if given is None or not self.has_keys:
            if is_open_path:
                return "stranger"
            if not self.has_keys and self.is_open:
                return "guest"
            raise _refused(
                "an API key is needed, as Authorization: Bearer KEY or x-api-key: KEY"
                if self.has_keys
                else "an API key is needed and none is configured; "
                "make one with `osaurus keys create`"
            )
        verdict = judge(given, self.keys.keys if self.keys else (), self.configured())
        if verdict == "valid":
            return "owner"
        if is_open_path:
            return "stranger"
        raise _refused(_REFUSALS[verdict])


def caller_of(request: Request) -> Caller:
    return request.scope.get(_CALLER_KEY, "stranger")


def require_owner(request: Request) -> None:
    """Raises `RequestRefused` (403), for a page too that speaks through the owner's browser."""
    if caller_of(request) != "owner" or is_foreign_page(request.scope):
        raise RequestRefused(
            "local_only", "this path answers programs of this machine, and those with a key, only"
        )


def _refused(message: str) -> RequestRefused:
    return RequestRefused("invalid_api_key", message, _CHALLENGE)


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    return not any(
        name in _FORWARDING or name.startswith(_FORWARDING_PREFIX) for name, _ in scope["headers"]
    )


def _credential(scope: Scope) -> str | None:
    """The key as sent; the first of the two headers that has one."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").strip().partition(" ")
            if scheme.lower() == "bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" and value.strip():
            return value.decode("latin-1").strip()
    return None
