"""Token ids to text, one token at a time: whole code points, never half of one.

In: the bytes of each token. Out: the longest text that later bytes can neither change nor
join. No clean-up, no look-back window, no re-decoding, so the work is linear. Knows nothing
of markers or stop strings.
"""

from __future__ import annotations

import codecs
from typing import Protocol

import regex

_ZWJ = "\u200d"
_REGIONAL_A, _REGIONAL_Z = "\U0001f1e6", "\U0001f1ff"

#: A trailing zero-width joiner together with the emoji it hangs on, skin tone and variation
#: selector included. At most four code points are ever held.
_OPEN_JOIN = regex.compile("[^\u200d]?[\ufe0f\U0001f3fb-\U0001f3ff]{0,2}\u200d$")


class TokenBytes(Protocol):
    """What this room needs of a tokenizer. Special tokens give the bytes of their text."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Turns the bytes of successive tokens into text.

    What is held back: the bytes of an incomplete code point, a regional indicator that
    still lacks its partner, and a sequence that ends in a zero-width joiner. Bytes become
    U+FFFD, by the maximal-subpart rule of `bytes.decode(errors="replace")`, only once no
    continuation could make them valid.

    Positions are code points counted from the start of the output, released or not, so
    that a caller can say which characters a token has a share in.
    """

    __slots__ = ("_decoder", "_held", "_pending", "_position", "_run_is_odd")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._pending = False
        self._position = 0
        self._run_is_odd = False

    def push(self, data: bytes) -> str:
        """The text that `data` makes final; often empty inside a multi-byte character."""
        text = self._decoder.decode(data)
        if data:
            self._pending = bool(self._decoder.getstate()[0])
        if not text:
            return ""
        self._position += len(text)
        held, self._held = self._held, ""
        keep = self._count_joinable(held, text)
        if held:
            text = held + text
        if keep:
            self._held = text[-keep:]
            return text[:-keep]
        return text

    def flush(self) -> str:
        """Everything still held; an incomplete code point becomes one U+FFFD."""
        tail = self._decoder.decode(b"", final=True)
        self._position += len(tail)
        self._pending = False
        text, self._held = self._held + tail, ""
        return text

    @property
    def next_start(self) -> int:
        """Index of the code point that the next byte belongs to."""
        return self._position

    @property
    def last_end(self) -> int:
        """One past the index of the code point that the last byte belongs to.

        An incomplete code point counts: whether it completes or fails, it becomes one.
        """
        return self._position + self._pending

    def _count_joinable(self, held: str, text: str) -> int:
        """How many trailing code points of `held + text` may still join what follows."""
        last = text[-1]
        if _REGIONAL_A <= last <= _REGIONAL_Z:
            run = len(text) - len(text.rstrip(_REGIONALS))
            # A run that fills the whole piece continues the one before it: held or sent.
            before = self._run_is_odd if run == len(text) else False
            self._run_is_odd = bool(run % 2) != before
            return int(self._run_is_odd)
        self._run_is_odd = False
        if last == _ZWJ:
            found = _OPEN_JOIN.search((held + text)[-4:])
            return len(found.group()) if found else 1
        return 0


_REGIONALS = "".join(map(chr, range(ord(_REGIONAL_A), ord(_REGIONAL_Z) + 1)))
