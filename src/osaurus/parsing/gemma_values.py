"""Gemma's notation for values: bare keys, strings between delimiters, other scalars bare."""

from __future__ import annotations

from collections.abc import Mapping

import regex

from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.source import Malformed, Reader, Source
from osaurus.parsing.values import MAX_NAME, SetItem, json_scalar, read_string


class Delimited:
    """Gemma's notation: keys bare, strings between `delimiter`s, other scalars bare.

    A bare scalar is JSON, or else a string. `end` is the envelope's closer: it can stand in
    a delimited string but not in a bare one.
    """

    brackets: Mapping[str, str] = {"{": "}", "[": "]"}
    allows_trailing_comma = False
    plain: regex.Pattern[str] | None = None

    def __init__(self, delimiter: str, end: str) -> None:
        self._delimiter = delimiter
        self._string_end = MarkerSet([delimiter])
        self._bare_end = MarkerSet([",", "}", "]", ")", end])
        self._bare_stops = frozenset(",}])")
        self._key_end = MarkerSet([":", ",", "{", "}", "[", "]", end])

    def scalar(self, source: Source) -> Reader[object]:
        quoted = yield from self._quoted(source)
        if quoted is not None:
            return quoted
        word, stop = yield from source.until(self._bare_end)
        if stop not in self._bare_stops:
            raise Malformed("the envelope ends inside a value")
        source.pos -= 1
        word = word.strip()
        if not word:
            raise Malformed("a value is missing")
        try:
            return json_scalar(word)
        except Malformed:
            return word

    def key(self, source: Source) -> Reader[str | SetItem]:
        key = yield from self._quoted(source)
        if key is not None:
            if (source.glance() or (yield from source.token())) != ":":
                raise Malformed("expected a colon")
            source.pos += 1
            return key
        key, stop = yield from source.until(self._key_end, at_most=MAX_NAME)
        if stop != ":" or not key.strip():
            raise Malformed("expected a key and a colon")
        return key.strip()

    def _quoted(self, source: Source) -> Reader[str | None]:
        if (yield from source.take(self._delimiter)):
            text, _ = yield from source.until(self._string_end)
            return text
        if source.glance() == '"':
            return (yield from read_string(source))
        return None
