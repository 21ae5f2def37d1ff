"""Keeps the text of messages from turning into control tokens.

A chat template mixes its own markup with what clients wrote. Before rendering, every occurrence
of a control token's text inside client text is broken by a *guard*, a Unicode noncharacter that
the request holds nowhere; after rendering, the runs of text with guards in them are encoded
as plain text and everything else with its control tokens. Nothing is stripped or escaped.

    "hi<|im_end|>"  ->  "hi<G|im_end|>"  ->  template  ->  plain "hi<|im_end|>" between the
                                                           template's own <|im_end|> tokens
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from osaurus.errors import InvalidField

#: Noncharacters: valid in every string, never assigned, in no vocabulary. U+FFFE is left out,
#: it marks sentinels.
_CANDIDATES = tuple(map(chr, range(0xFDD0, 0xFDF0)))


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of the rendered prompt. A plain run must not yield a single control token."""

    text: str
    is_plain: bool


class ControlTexts:
    """A vocabulary's control token texts, ready for search. Some hold thousands that begin
    with the same character, so an alternation of all of them would be slow."""

    def __init__(self, texts: Collection[str]) -> None:
        self._sorted = sorted(filter(None, texts))
        self._texts = frozenset(self._sorted)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = "".join(re.escape(char) for char in sorted({text[0] for text in self._texts}))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def find(self, text: str, guard: str) -> Iterator[tuple[int, int]]:
        """Start and end of the longest occurrence at every place that has one; they may
        overlap. One with a guard behind its first character is none."""
        for match in self._first.finditer(text):
            start = match.start()
            for length in self._lengths:
                if text[start : start + length] in self._texts:
                    if text[start + 1 : start + 2] != guard:
                        yield start, start + length
                    break

    def openings(self, text: str) -> Iterator[int]:
        """Every place from which `text` ends like a control token begins."""
        longest = self._lengths[0] if self._lengths else 0
        for match in self._first.finditer(text, max(0, len(text) - longest + 1)):
            tail = text[match.start() :]
            at = bisect_left(self._sorted, tail)
            while at < len(self._sorted) and self._sorted[at] == tail:
                at += 1
            if at < len(self._sorted) and self._sorted[at].startswith(tail):
                yield match.start()


@lru_cache(maxsize=8)
def prepared(texts: tuple[str, ...]) -> ControlTexts:
    """The search structure of a resident model's control texts, built once."""
    return ControlTexts(texts)


class ContentGuard:
    """Guards one request. `contents` is everything that will be protected: it is looked at
    to find a noncharacter that is free. Raises `InvalidField` when there is none."""

    def __init__(self, control: ControlTexts, contents: Any) -> None:
        texts = list(_strings(contents))
        self._control = control
        self._guard = next(
            (mark for mark in _CANDIDATES if not any(mark in text for text in texts)), ""
        )
        if not self._guard:
            raise InvalidField("messages", "hold every Unicode noncharacter; remove one of them")

    def protect(self, value: Any) -> Any:
        """A copy of `value` with every string in it guarded, keys of mappings too."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def runs(self, rendered: str) -> Iterator[Run]:
        """`rendered` without guards, cut so that guarded text stands in plain runs alone.

        A plain run reaches from one of the template's own control tokens to the next and
        holds none.
        """
        if self._guard not in rendered:
            yield Run(rendered, is_plain=False)
            return
        trusted_from = position = 0
        for start, end in self._control.find(rendered, self._guard):
            if start < position:
                continue  # inside the token before
            if self._guard in rendered[position:start]:
                if trusted_from < position:
                    yield Run(rendered[trusted_from:position], is_plain=False)
                yield self._plain(rendered[position:start])
                trusted_from = start
            position = end
        trusted_to = position if self._guard in rendered[position:] else len(rendered)
        if trusted_from < trusted_to:
            yield Run(rendered[trusted_from:trusted_to], is_plain=False)
        if trusted_to < len(rendered):
            yield self._plain(rendered[trusted_to:])

    def _plain(self, text: str) -> Run:
        return Run(text.replace(self._guard, ""), is_plain=True)

    def _protect_text(self, text: str) -> str:
        found = {start for start, _ in self._control.find(text, self._guard)}
        # Text that ends like a control token begins must not be completed by what follows.
        found.update(self._control.openings(text))
        if not found:
            return text
        cuts = sorted(start + 1 for start in found)
        starts = [0, *cuts]
        return self._guard.join(
            text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True)
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
