"""The many spellings of one route.

Clients put `/v1`, `/api` or both before the same names, and some end them with a slash. The
router knows each name once; which prefix was there is remembered, since it decides the few
routes that mean different things to different protocols, and whose errors they speak.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from starlette.types import Scope

Protocol = Literal["openai", "responses", "anthropic", "ollama"]
Style = Literal["anthropic", "ollama", "openai", "bare"]

#: Longest first. Only whole segments count: `/v1beta` has no prefix.
_PREFIXES: tuple[tuple[str, Style], ...] = (
    ("/v1/api", "openai"),
    ("/api", "ollama"),
    ("/v1", "openai"),
)
_ANTHROPIC = "/anthropic"

_OLLAMA_NAMES = "chat generate embed tags show ps version pull push create copy delete"
_OLLAMA_PATHS = frozenset(f"/{name}" for name in _OLLAMA_NAMES.split())

_STYLE_KEY = "osaurus.style"


class NormalPath(NamedTuple):
    path: str
    style: Style


def normalize(path: str) -> NormalPath:
    """`/anthropic/v1/messages`, `/v1/messages/` and `/messages` are all `/messages`."""
    style: Style = "bare"
    if _begins_with(path, _ANTHROPIC):
        path, style = path[len(_ANTHROPIC) :], "anthropic"
    for prefix, meaning in _PREFIXES:
        if _begins_with(path, prefix):
            path = path[len(prefix) :]
            style = meaning if style == "bare" else style
            break
    return NormalPath(path.rstrip("/") or "/", style)


def rewrite(scope: Scope) -> None:
    """Make the path of `scope` the normal one, once."""
    if _STYLE_KEY not in scope:
        scope["path"], scope[_STYLE_KEY] = normalize(scope["path"])


def style_of(scope: Scope) -> Style:
    """The prefix that the path came with."""
    return scope[_STYLE_KEY] if _STYLE_KEY in scope else normalize(scope["path"]).style


def protocol_of(scope: Scope) -> Protocol:
    """Whose request this is, known or not: errors are answered in that protocol's shape."""
    protocol = protocol_of_path(normalize(scope["path"]).path, style_of(scope))
    return "anthropic" if protocol == "openai" and _is_anthropic_client(scope) else protocol


def _is_anthropic_client(scope: Scope) -> bool:
    """Paths such as `/models` are two protocols'; the clients of one send this header."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def protocol_of_path(path: str, style: Style) -> Protocol:
    if style == "anthropic" or _begins_with(path, "/messages"):
        return "anthropic"
    if _begins_with(path, "/responses"):
        return "responses"
    if path in _OLLAMA_PATHS or _begins_with(path, "/blobs"):
        return "ollama"
    return "ollama" if style == "ollama" and path == "/embeddings" else "openai"


def _begins_with(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")
