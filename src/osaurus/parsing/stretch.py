"""Blanks that begin a stretch of text: held until it is known whether the stretch is blank.

A think block of blanks is no reasoning, and blanks between two calls are no content; either
is known only once the stretch ends or its first word comes.
"""

from __future__ import annotations

from osaurus.parsing.pieces import Piece, Rail

#: A stretch of more blanks than this counts as text and is no longer held.
MAX_HELD_BLANKS = 1000


class Stretch:
    """A stretch of one rail: its leading blanks wait until it is known whether they count.

    Pieces of other rails that fall between held blanks wait with them, to keep the order.
    """

    __slots__ = ("_dropped", "_held", "_num_held", "_out", "_rail", "has_text")

    def __init__(self, out: list[Piece], rail: Rail, dropped: Rail) -> None:
        self._out = out
        self._rail = rail
        self._dropped = dropped
        self._held: list[Piece] = []
        self._num_held = 0
        self.has_text = False

    def add(self, text: str) -> None:
        if not text:
            return
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
