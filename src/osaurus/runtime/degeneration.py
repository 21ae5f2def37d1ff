"""Whether an answer has begun to repeat itself without end. Observes; changes and ends nothing.

Two signs: one character over and over, in several pieces (a divider, a blob in one piece or a
drawn-out word is none), or the same few words back to back at least twelve times.
"""

from __future__ import annotations

from typing import Literal

Degeneration = Literal["repeated_character", "repeated_phrase"]

#: Repeats of one character: of a letter or digit, and of any other, which dividers are made of.
_MAX_RUN_WORD, _MAX_RUN_OTHER = 64, 256
#: Pieces of text in which the run must have grown.
_MIN_PIECES = 3
#: Lengths of a phrase in words, and how often it must follow on itself.
_PHRASE_WORDS = range(3, 13)
_MIN_REPEATS = 12
#: Characters that are looked at.
_TAIL = 4096


class DegenerationDetector:
    """Feed it every piece of visible text and of thinking of one answer, in order."""

    def __init__(self) -> None:
        self.found: Degeneration | None = None  #: stays once it is set
        self._run_character = ""
        self._run_length = 0
        self._run_pieces = 0
        self._tail = ""

    def observe(self, text: str) -> Degeneration | None:
        """What this piece gave away; None for one that gave nothing away, and ever after the
        first find."""
        if self.found is not None or not text:
            return None
        if self._is_run(text):
            self.found = "repeated_character"
        elif self._is_loop(text):
            self.found = "repeated_phrase"
        return self.found

    def _is_run(self, text: str) -> bool:
        grew = False
        for character in text:
            if character.isspace():
                self._run_character, self._run_length, self._run_pieces = "", 0, 0
                grew = False
            elif character != self._run_character:
                self._run_character, self._run_length, self._run_pieces = character, 1, 0
                grew = True
            else:
                self._run_length += 1
                grew = True
        self._run_pieces += grew
        limit = _MAX_RUN_WORD if self._run_character.isalnum() else _MAX_RUN_OTHER
        return self._run_length >= limit and self._run_pieces >= _MIN_PIECES

    def _is_loop(self, text: str) -> bool:
        self._tail = (self._tail + text)[-_TAIL:]
        if not any(map(str.isspace, text)):
            return False  # no word has ended
        words = self._tail.split()
        if not self._tail[-1].isspace():
            words.pop()  # it may go on
        return any(_repeats(words, length) for length in _PHRASE_WORDS)


def _repeats(words: list[str], length: int) -> bool:
    """Whether the last words are a phrase of `length`, often enough. One without a letter or
    digit is the rule of a table."""
    wanted = length * _MIN_REPEATS
    if len(words) < wanted:
        return False
    phrase = words[-length:]
    if not any(character.isalnum() for word in phrase for character in word):
        return False
    first = len(words) - wanted
    return all(words[first + i] == phrase[i % length] for i in range(wanted))
