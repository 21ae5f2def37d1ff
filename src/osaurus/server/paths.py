"""The many spellings of one route.

Clients put `/v1`, `/api` or both before the same names, and some end them with a slash. The
router knows each name once; which prefix was there is remembered, since it decides the few
routes that mean different things to different protocols.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Style = Literal["anthropic", "ollama", "openai", "bare"]

#: Longest first. Only whole segments count: `/v1beta` has no prefix.
_PREFIXES: tuple[tuple[str, Style], ...] = (
    ("/v1/api", "openai"),
    ("/api", "ollama"),
    ("/v1", "openai"),
)
_ANTHROPIC = "/anthropic"


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


def _begins_with(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")
