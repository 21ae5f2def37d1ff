"""The machine of an answer whose visible text a grammar decides: thinking first, then data.

Marker-looking text in such an answer is data (a JSON string may hold any), so once the answer
has begun nothing is looked for. White space between the thinking and the answer is neither's.

    lead --opener--> thinking --closer--> gap --text--> answer
    lead --anything else-------------------------------> answer
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import regex

from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.pieces import CallFailure, Piece, Rail
from osaurus.parsing.reasoning import ReasoningFormat, Start

_BLANKS = regex.compile(r"[ \t\r\n]*+")


class _State(Enum):
    LEAD = "lead"
    HEADER = "header"
    THINKING = "thinking"
    GAP = "gap"
    ANSWER = "answer"


class ShapedMachine:
    """One instance a choice; see `pieces.OutputMachine`."""

    def __init__(self, reasoning: ReasoningFormat, start: Start) -> None:
        self._format = reasoning
        self._openers = MarkerSet(reasoning.openers)
        self._closers = MarkerSet(reasoning.closers)
        self._text = ""
        self._ended = False
        self._state = {
            Start.CONTENT: _State.LEAD,
            Start.HEADER: _State.HEADER,
            Start.REASONING: _State.THINKING,
        }[start]

    @property
    def in_reasoning(self) -> bool:
        return self._state in (_State.HEADER, _State.THINKING)

    @property
    def has_failed(self) -> bool:
        return False

    @property
    def failures(self) -> Sequence[CallFailure]:
        return ()

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        self._ended = True
        return self.push("")

    def abandon(self) -> list[Piece]:
        pieces: list[Piece] = []
        self._take(pieces, Rail.CONTENT, len(self._text))
        return pieces

    def _take(self, pieces: list[Piece], rail: Rail, count: int) -> None:
        if count:
            pieces.append(Piece(rail, self._text[:count]))
            self._text = self._text[count:]

    def _step(self, pieces: list[Piece]) -> bool:
        """False when it needs more text."""
        text = self._text
        match self._state:
            case _State.LEAD:
                return self._lead(pieces)
            case _State.HEADER:
                header = self._format.header
                found = header.match(text, partial=True) if header is not None else None
                if found is not None and found.partial and not self._ended:
                    return False
                if found is not None and not found.partial:
                    self._take(pieces, Rail.THINK_MARK, found.end())
                self._state = _State.THINKING
            case _State.THINKING:
                hit = self._closers.find(text, 0, len(text))
                if hit is None:
                    held = len(text) if self._ended else self._closers.partial(text, 0, len(text))
                    self._take(pieces, Rail.REASONING, held)
                    return False
                self._take(pieces, Rail.REASONING, hit.start)
                self._take(pieces, Rail.THINK_MARK, hit.end - hit.start)
                self._state = _State.GAP
            case _State.GAP:
                self._take(pieces, Rail.NOISE, _end_of_blanks(text))
                if self._text:
                    self._state = _State.ANSWER
            case _State.ANSWER:
                self._take(pieces, Rail.CONTENT, len(text))
        return bool(self._text)

    def _lead(self, pieces: list[Piece]) -> bool:
        blanks = _end_of_blanks(self._text)
        rest = self._text[blanks:]
        opener = next((o for o in self._format.openers if rest.startswith(o)), None)
        if opener is not None:
            self._take(pieces, Rail.THINK_MARK, blanks + len(opener))
            has_header = self._format.header is not None and opener == self._format.openers[0]
            self._state = _State.HEADER if has_header else _State.THINKING
            return True
        if not self._ended and any(o.startswith(rest) for o in self._format.openers):
            return False
        self._state = _State.ANSWER
        return True


def _end_of_blanks(text: str) -> int:
    found = _BLANKS.match(text)
    return found.end() if found is not None else 0
