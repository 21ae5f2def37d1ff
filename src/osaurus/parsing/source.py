"""The text a body reader reads: a window on the stream that grows while the reader waits.

A reader is a generator. It consumes text by moving `pos`, yields when it has run out, and is
resumed once there is more. It never looks at the same text twice, keeps no text of its own
that it does not need, and so costs time in proportion to what it read. How a read can end:

    returns              the body is complete
    raises Cut           the stream ended inside it
    raises Malformed     its grammar was broken, with a reason that quotes nothing
    raises NotACall      it can no longer be a call to an offered tool
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import regex

from osaurus.parsing.markers import MarkerSet

_T = TypeVar("_T")
Reader = Generator[None, None, _T]

BLANK = " \t\r\n"
_BLANKS = regex.compile(r"[ \t\r\n]*+")
#: How many blanks may stand between a body and its closer. Bounds what a look-ahead holds.
MAX_GAP = 256
_GAP = regex.compile(r"[ \t\r\n]{0,256}+")


class Cut(Exception):
    """The stream ended inside a body."""


class Malformed(Exception):
    """A body broke its grammar. The message is a reason for logs and holds no payload."""


class NotACall(Exception):
    """The text cannot be a call to an offered tool: a name or a key does not fit."""


class Source:
    """The unread text of a response, shared by the machine and the reader of the moment.

    `text[pos:end]` is what may be read now; `end` is less than the text's length when the
    machine keeps a reader from reading past a reasoning closer. Between `begin` and
    `release` everything read is kept, so that it can be taken back (`rewind`).
    """

    __slots__ = ("_mark", "_num_spent", "_spent", "base", "end", "ended", "pos", "saved", "text")

    def __init__(self) -> None:
        self.text = ""
        #: Position of `text[0]` in the whole stream.
        self.base = 0
        self.pos = 0
        self.end = 0
        self.ended = False
        #: A reader may come back to an earlier place: what it read must not be given away.
        self.saved = False
        self._mark: int | None = None
        self._spent: list[str] = []
        self._num_spent = 0

    # -- for the machine

    def feed(self, more: str) -> None:
        """Append text and let go of what was read; `pos` becomes 0."""
        if self._mark is not None:
            self._spend(self.text[self._mark : self.pos])
            self._mark = 0
        self.text = self.text[self.pos :] + more
        self.base += self.pos
        self.pos, self.end = 0, len(self.text)

    def begin(self) -> None:
        """Keep what is read from `pos` on."""
        self._forget()
        self._mark = self.pos

    def consumed(self) -> str:
        """What was read since `begin` or the last `release`."""
        mark = self.pos if self._mark is None else self._mark
        return "".join(self._spent) + self.text[mark : self.pos]

    def release(self) -> str:
        """Give away what was read so far and stop being able to take it back."""
        text = self.consumed()
        self._forget()
        self._mark = self.pos
        return text

    def close(self) -> str:
        """Give away what was read and keep nothing from here on."""
        text = self.consumed()
        self._forget()
        return text

    def rewind(self) -> None:
        """Unread everything since `begin`, and keep nothing more."""
        mark = self.pos if self._mark is None else self._mark
        if self._spent:
            # Some of it came in earlier pieces: then `mark` is 0.
            self.text = "".join(self._spent) + self.text
            self.base -= self._num_spent
            self.pos = 0
        else:
            self.pos = mark
        self.end = len(self.text)
        self._forget()

    def _spend(self, text: str) -> None:
        if text:
            self._spent.append(text)
            self._num_spent += len(text)

    def _forget(self) -> None:
        self._mark = None
        self._spent.clear()
        self._num_spent = 0
        self.saved = False

    # -- for readers

    def save(self) -> int:
        """A place to come back to with `restore`; until then nothing read is given away."""
        self.saved = True
        mark = self.pos if self._mark is None else self._mark
        return self._num_spent + self.pos - mark

    def restore(self, place: int) -> None:
        """Unread everything after `place`."""
        kept = self.consumed()
        self.base += self.pos - (len(kept) - place)
        self.text = kept[place:] + self.text[self.pos :]
        self.pos, self.end = 0, len(self.text)
        self._forget()
        self._spend(kept[:place])
        self._mark = 0

    def more(self) -> Reader[None]:
        """Wait for text. Raises `Cut` when there will be none."""
        if self.ended:
            raise Cut
        yield

    def glance(self) -> str:
        """The next character if it is here and not blank, else the empty string."""
        if self.pos < self.end:
            char = self.text[self.pos]
            if char not in BLANK:
                return char
        return ""

    def peek(self) -> Reader[str]:
        while self.pos >= self.end:
            yield from self.more()
        return self.text[self.pos]

    def blanks(self) -> Reader[None]:
        """Consume blanks, if any. At the end of the stream it simply returns."""
        while True:
            found = _BLANKS.match(self.text, self.pos, self.end)
            self.pos = found.end() if found else self.pos
            if self.pos < self.end or self.ended:
                return
            yield

    def token(self) -> Reader[str]:
        """Consume blanks; the character that follows, unread."""
        yield from self.blanks()
        return (yield from self.peek())

    def at(self, *markers: str) -> Reader[str]:
        """The longest of `markers` that the text begins with, unread; empty if none does."""
        while True:
            here = self.end - self.pos
            best, is_open = "", False
            for marker in markers:
                if self.text.startswith(marker, self.pos, self.end):
                    best = max(best, marker, key=len)
                elif here < len(marker) and marker.startswith(self.text[self.pos : self.end]):
                    is_open = True
            if not is_open or self.ended:
                return best
            yield

    def take(self, *markers: str) -> Reader[str]:
        """Like `at`, consuming the marker."""
        found = yield from self.at(*markers)
        self.pos += len(found)
        return found

    def expect(self, *markers: str) -> Reader[str]:
        """Like `take`; raises `Malformed` when none is there."""
        found = yield from self.take(*markers)
        if not found:
            if self.ended and self.pos >= self.end:
                raise Cut
            raise Malformed(f"expected {' or '.join(markers)}")
        return found

    def until(self, stops: MarkerSet, *, at_most: int | None = None) -> Reader[tuple[str, str]]:
        """The text before the next of `stops`, and that stop; both are consumed."""
        parts: list[str] = []
        length = 0
        while True:
            # Past `at_most` there is nothing to look for: a search to the end would be in vain.
            room = len(self.text) if at_most is None else at_most - length + stops.longest
            end = min(self.end, self.pos + room)
            hit = stops.find(self.text, self.pos, end)
            until = hit.start if hit else stops.partial(self.text, self.pos, end)
            parts.append(self.text[self.pos : until])
            length += until - self.pos
            self.pos = until
            self.limit(length, at_most)
            if hit:
                self.pos = hit.end
                return "".join(parts), hit.marker
            yield from self.more()

    def limit(self, length: int, at_most: int | None) -> None:
        """Raise `Malformed` when `length` characters are too many, at the first too many.

        Going back to it makes the place of the fault independent of how the text came.
        """
        if at_most is not None and length > at_most:
            self.pos -= length - at_most
            raise Malformed(f"longer than {at_most} characters")

    def ahead(
        self, pattern: regex.Pattern[str], *, drops_cut: bool = False
    ) -> Reader[regex.Match[str] | None]:
        """Match `pattern` here without consuming; it must be of bounded length.

        With `drops_cut` a match that the end of the stream cut is consumed and absent.
        """
        while True:
            found = pattern.match(self.text, self.pos, self.end, partial=True)
            if found is None or not found.partial:
                return found
            if self.ended:
                if drops_cut and found.group().strip(BLANK):
                    self.pos = self.end
                return None
            yield

    def closer(self, *closers: str) -> Reader[str]:
        """Consume blanks and one of `closers`, or nothing at all.

        A closer that the end of the stream cut is consumed too and reported as absent.
        """
        longest = max(map(len, closers), default=0)
        while True:
            gap = _GAP.match(self.text, self.pos, self.end)
            start = gap.end() if gap else self.pos
            for closer in closers:
                if self.text.startswith(closer, start, self.end):
                    self.pos = start + len(closer)
                    return closer
            rest = self.text[start : min(self.end, start + longest)]
            is_open = any(len(rest) < len(c) and c.startswith(rest) for c in closers)
            if not is_open or start - self.pos >= MAX_GAP:
                return ""
            if self.ended:
                if rest:
                    self.pos = self.end
                return ""
            yield


def run(reader: Reader[_T]) -> _T:
    """Drive a reader over a source that has already ended."""
    try:
        while True:
            next(reader)
    except StopIteration as done:
        value: Any = done.value
        return value
