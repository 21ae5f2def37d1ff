"""Fenced code blocks in visible text: is this place inside one?

A fence is three or more backticks or tildes that begin a line, up to a line of at least as
many of the same. Only what a line begins with is kept.
"""

from __future__ import annotations

import regex

_OPENING = regex.compile(r" {0,3}(?:(`{3,})[^`]*|(~{3,}).*)", regex.DOTALL)
_CLOSING = regex.compile(r" {0,3}(`{3,}|~{3,})[ \t\r]*")
#: No fence line that matters is longer.
_MAX_LINE = 256


class Fences:
    """Follows the fences of a text that arrives in pieces."""

    __slots__ = ("_fence", "_line")

    def __init__(self) -> None:
        self._fence = ""
        self._line = ""

    def feed(self, text: str) -> None:
        self._fence, self._line = self._advanced(text)

    def is_open_after(self, text: str) -> bool:
        """Whether a place right behind `text`, which is not fed, is in a fence."""
        fence, line = self._advanced(text)
        return bool(fence) or _OPENING.fullmatch(line) is not None

    def _advanced(self, text: str) -> tuple[str, str]:
        fence, line = self._fence, self._line
        first, *others = text.split("\n")
        line += first[: _MAX_LINE - len(line)]
        for other in others:
            if not fence:
                found = _OPENING.fullmatch(line)
                fence = (found.group(1) or found.group(2)) if found else ""
            else:
                found = _CLOSING.fullmatch(line)
                if found and found.group(1).startswith(fence):
                    fence = ""
            line = other[:_MAX_LINE]
        return fence, line
