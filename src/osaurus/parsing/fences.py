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

    @property
    def is_open(self) -> bool:
        return bool(self._fence) or _OPENING.fullmatch(self._line) is not None

    def feed(self, text: str) -> None:
        first, *others = text.split("\n")
        self._extend(first)
        for line in others:
            self._end_line()
            self._extend(line)

    def would_be_open(self, text: str) -> bool:
        """`is_open` after `text`, which is not fed."""
        trial = Fences()
        trial._fence, trial._line = self._fence, self._line
        trial.feed(text)
        return trial.is_open

    def _extend(self, text: str) -> None:
        self._line += text[: _MAX_LINE - len(self._line)]

    def _end_line(self) -> None:
        if self._fence:
            found = _CLOSING.fullmatch(self._line)
            if found and found.group(1).startswith(self._fence):
                self._fence = ""
        else:
            found = _OPENING.fullmatch(self._line)
            if found:
                self._fence = found.group(1) or found.group(2)
        self._line = ""
