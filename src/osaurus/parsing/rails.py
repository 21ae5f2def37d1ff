"""Where separated text goes: the pieces of a response, in order, with blanks decided late.

A think block of blanks is no reasoning, and blanks between two calls are no content; either
is known only when the stretch ends or its first word comes. So the blanks that begin a stretch
are held here, with whatever marker falls between them.
"""

from __future__ import annotations

from osaurus.parsing.fences import Fences
from osaurus.parsing.pieces import Piece, Rail
from osaurus.types.events import ToolCall

#: A stretch that begins with more blanks than this counts as text and is no longer held.
MAX_HELD_BLANKS = 1000


class _Stretch:
    """A stretch of one rail. Pieces of other rails between held blanks wait with them."""

    __slots__ = ("_dropped", "_held", "_num_held", "_out", "_rail", "has_text")

    def __init__(self, out: list[Piece], rail: Rail, dropped: Rail) -> None:
        self._out = out
        self._rail = rail
        self._dropped = dropped
        self._held: list[Piece] = []
        self._num_held = 0
        self.has_text = False

    def add(self, text: str) -> None:
        if not self.has_text:
            self._num_held += len(text)
            if text.isspace() and self._num_held <= MAX_HELD_BLANKS:
                self._held.append(Piece(self._rail, text))
                return
            self.settle(keep=True)
            self.has_text = True
        self._out.append(Piece(self._rail, text))

    def beside(self, piece: Piece) -> None:
        """A piece of another rail that does not end the stretch."""
        (self._held if self._held else self._out).append(piece)

    def settle(self, *, keep: bool) -> None:
        """Send what is held, its blanks as text or as dropped."""
        for piece in self._held:
            dropped = piece.rail is self._rail and not keep
            self._out.append(Piece(self._dropped, piece.text) if dropped else piece)
        self._held.clear()
        self._num_held = 0

    def end(self, *, keep: bool) -> None:
        self.settle(keep=keep)
        self.has_text = False


class Rails:
    """Collects pieces. Content is also followed for line starts and code fences."""

    def __init__(self, *, watches_fences: bool = False) -> None:
        self._out: list[Piece] = []
        self._content = _Stretch(self._out, Rail.CONTENT, Rail.NOISE)
        self._thought = _Stretch(self._out, Rail.REASONING, Rail.THINK_MARK)
        self._fences = Fences() if watches_fences else None
        #: The stretch of content before this one ended at a call.
        self._after_call = False
        self.has_content = False
        self.line_is_blank = True

    def take(self) -> list[Piece]:
        pieces = list(self._out)
        self._out.clear()
        return pieces

    def show(self, text: str) -> None:
        """Visible text."""
        if not text:
            return
        _, broke, line = text.rpartition("\n")
        self.line_is_blank = not line.strip(" \t") and (bool(broke) or self.line_is_blank)
        self.has_content = self.has_content or not text.isspace()
        if self._fences is not None:
            self._fences.feed(text)
        self._content.add(text)

    def drop(self, text: str, rail: Rail = Rail.NOISE) -> None:
        """A marker in visible text that is neither shown nor ends the stretch."""
        self._content.beside(Piece(rail, text))

    def end_content(self, *, at_call: bool) -> None:
        """A stretch of content ends. One of blanks that touches a call is dropped."""
        self._content.end(keep=not (at_call or self._after_call))
        self._after_call = at_call

    @property
    def is_behind_call(self) -> bool:
        """Whether nothing but blanks was shown since a call."""
        return self._after_call and not self._content.has_text

    def think(self, text: str) -> None:
        """Reasoning."""
        if text:
            self._thought.add(text)

    def drop_thought(self, text: str) -> None:
        """A marker inside reasoning that does not end the block."""
        self._thought.beside(Piece(Rail.THINK_MARK, text))

    def settle_thought(self) -> None:
        """Blanks that begin a block are no reasoning, even if a call follows them."""
        self._thought.settle(keep=False)

    def end_thought(self, *, keep: bool = False) -> None:
        self._thought.end(keep=keep)

    def mark(self, text: str) -> None:
        """A reasoning marker or header between stretches."""
        self.put(Rail.THINK_MARK, text)

    def put(self, rail: Rail, text: str, calls: tuple[ToolCall, ...] = ()) -> None:
        """Any other piece between stretches."""
        if text or calls:
            self._out.append(Piece(rail, text, calls))

    def is_fenced(self, text: str = "") -> bool:
        """Whether, after `text` more, visible text is inside a code block."""
        return self._fences is not None and self._fences.is_open_after(text)
