"""Finding markers in a stream: where one begins, and where one may be beginning.

A marker is a fixed piece of text. Nothing here knows what a marker means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import regex

#: A protocol marker that the end of the stream cut is dropped when this much of it was written.
MIN_HALF_MARKER = 5


@dataclass(frozen=True, slots=True)
class Hit:
    """A marker found at `start..end` of the searched text."""

    start: int
    end: int
    marker: str


class MarkerSet:
    """A set of markers that is searched for all at once; the longest spelling wins.

    `find` gives the leftmost whole marker. `partial` says where the text has to be held:
    the start of the longest suffix that is a proper prefix of a marker. A caller that acts
    on a hit only when it starts before `partial` never cuts a longer spelling short, and
    never lets a false start hide a real marker inside it (`<<tool_call>`).
    """

    __slots__ = ("_first", "_pattern", "_prefixes", "longest", "markers")

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = frozenset(markers)
        ordered = sorted(self.markers, key=lambda marker: (-len(marker), marker))
        self.longest = max(map(len, ordered), default=0)
        self._prefixes = frozenset(m[:n] for m in ordered for n in range(1, len(m)))
        # `(?!)` never matches: an empty set finds nothing.
        self._pattern = regex.compile("|".join(map(regex.escape, ordered)) or "(?!)")
        heads = "|".join(regex.escape(head) for head in sorted({m[0] for m in ordered}))
        self._first = regex.compile(heads or "(?!)")

    def find(self, text: str, start: int, end: int) -> Hit | None:
        found = self._pattern.search(text, start, end)
        return None if found is None else Hit(found.start(), found.end(), found.group())

    def starting_at(self, text: str, start: int, end: int) -> Hit | None:
        found = self._pattern.match(text, start, end)
        return None if found is None else Hit(found.start(), found.end(), found.group())

    def partial(self, text: str, start: int, end: int) -> int:
        """Where an unfinished marker begins; `end` when there is none."""
        tail = max(start, end - self.longest + 1)
        for found in self._first.finditer(text, tail, end):
            if text[found.start() : end] in self._prefixes:
                return found.start()
        return end
