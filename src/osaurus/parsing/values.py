"""Reading one value as text arrives: the loop common to all notations, and JSON.

Brackets are read with an explicit stack, so nesting costs no recursion; a `Syntax` says what a
scalar and a key look like (`python_values` and `gemma_values` have two more). Strict: nothing is
repaired, closed or guessed. `NaN`, infinities and halves of surrogate pairs are no values, since
no JSON text could carry them on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from json import JSONDecodeError, JSONDecoder
from typing import Any, Protocol, cast

import regex

from osaurus.parsing.source import Cut, Malformed, Reader, Source, run

#: Deeper values than this are malformed: what reads them later may recurse.
MAX_DEPTH = 128
#: Longest key or function name that is read.
MAX_NAME = 256
#: Longest spelling of a number. Python itself refuses integers past 4,300 digits.
MAX_NUMBER = 4300

_STRING_BODY = regex.compile(r'(?:[^"\\]++|\\.)*+', regex.DOTALL)
_JSON_NUMBER = regex.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_RUN = regex.compile(r"[-+.0-9A-Za-z_]*+")
#: Models write real line breaks in strings.
_ANY_CONTROL = JSONDecoder(strict=False)
SURROGATE = regex.compile("[\ud800-\udfff]")
JSON_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None}


class Syntax(Protocol):
    """What a notation's scalars, keys and brackets look like."""

    brackets: Mapping[str, str]
    allows_trailing_comma: bool
    #: Whole scalars that need no generator: group 1 an integer, group 2 a plain string.
    plain: regex.Pattern[str] | None

    def scalar(self, source: Source) -> Reader[object]: ...

    def key(self, source: Source) -> Reader[str | SetItem]:
        """Read a key and its colon; or, in Python, a set's first element."""
        ...


class SetItem:
    """A brace that turned out to hold a set: its first element."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class _Frame:
    """A container that is still open."""

    __slots__ = ("closer", "has_comma", "key", "unique", "value")

    def __init__(self, opener: str, closer: str, unique: bool) -> None:
        self.value: dict[str, object] | list[object] = {} if opener == "{" else []
        self.closer = closer
        self.key = ""
        self.unique = unique
        self.has_comma = False

    def add(self, value: object) -> None:
        if isinstance(self.value, list):
            self.value.append(value)
            return
        if self.unique and self.key in self.value:
            raise Malformed("a key is repeated")
        self.value[self.key] = value

    def finished(self) -> object:
        """A Python parenthesis around one value without comma is that value."""
        if self.closer == ")" and not self.has_comma and len(self.value) == 1:
            return cast("list[object]", self.value)[0]
        return self.value


def read_value(source: Source, syntax: Syntax, *, unique: bool = False) -> Reader[Any]:
    """Read one value and leave `source` right behind it."""
    stack: list[_Frame] = []
    plain = syntax.plain
    while True:
        char = source.glance() or (yield from source.token())
        closer = syntax.brackets.get(char)
        if closer is None:
            found = plain.match(source.text, source.pos, source.end) if plain else None
            if found is None:
                value = yield from syntax.scalar(source)
            else:
                source.pos = found.end()
                value = found.group(2) if found.group(1) is None else int(found.group(1))
        else:
            source.pos += 1
            frame = _Frame(char, closer, unique)
            if (source.glance() or (yield from source.token())) != closer:
                if len(stack) == MAX_DEPTH:
                    raise Malformed(f"nested deeper than {MAX_DEPTH}")
                stack.append(frame)
                if char != "{":
                    continue
                key = yield from syntax.key(source)
                if isinstance(key, str):
                    frame.key = key
                    continue
                frame.value, value = [], key.value
            else:
                source.pos += 1
                value = frame.value
        while stack:
            frame = stack[-1]
            frame.add(value)
            char = source.glance() or (yield from source.token())
            if char == ",":
                source.pos += 1
                frame.has_comma = True
                if syntax.allows_trailing_comma:
                    char = source.glance() or (yield from source.token())
                if char != frame.closer:
                    if isinstance(frame.value, dict):
                        frame.key = yield from _next_key(source, syntax)
                    break
            if char != frame.closer:
                raise Malformed(f"expected a comma or {frame.closer}")
            source.pos += 1
            value = stack.pop().finished()
        else:
            return value


def _next_key(source: Source, syntax: Syntax) -> Reader[str]:
    if not source.glance():
        yield from source.token()
    key = yield from syntax.key(source)
    if not isinstance(key, str):
        raise Malformed("a key without a value")
    return key


def read_string(source: Source, *, at_most: int | None = None) -> Reader[str]:
    """A JSON string at its opening quote; raw control characters are accepted."""
    if (yield from source.peek()) != '"':
        raise Malformed("expected a string")
    source.pos += 1
    parts: list[str] = []
    length = 0
    while True:
        # One more than allowed, and room for the second half of an escape.
        room = len(source.text) if at_most is None else at_most - length + 2
        end = min(source.end, source.pos + room)
        found = _STRING_BODY.match(source.text, source.pos, end)
        stop = found.end() if found else source.pos
        parts.append(source.text[source.pos : stop])
        length += stop - source.pos
        source.pos = stop
        source.limit(length, at_most)
        if stop < source.end and source.text[stop] == '"':
            source.pos += 1
            break
        yield from source.more()
    raw = "".join(parts)
    if "\\" not in raw:
        return raw
    try:
        text = _ANY_CONTROL.decode(f'"{raw}"')
    except JSONDecodeError as error:
        raise Malformed("an escape sequence is not JSON") from error
    if SURROGATE.search(text):
        raise Malformed("half of a surrogate pair")
    return text


def read_run(source: Source, pattern: regex.Pattern[str], at_most: int) -> Reader[str]:
    """The characters that `pattern` (a possessive run) matches from here."""
    parts: list[str] = []
    length = 0
    while True:
        found = pattern.match(source.text, source.pos, min(source.end, source.pos + at_most + 1))
        stop = found.end() if found else source.pos
        parts.append(source.text[source.pos : stop])
        length += stop - source.pos
        source.pos = stop
        source.limit(length, at_most)
        if stop < source.end:
            return "".join(parts)
        yield from source.more()


def json_scalar(word: str) -> object:
    """The value of a JSON number, `true`, `false` or `null`. Raises `Malformed`."""
    if word in JSON_WORDS:
        return JSON_WORDS[word]
    found = _JSON_NUMBER.fullmatch(word)
    if found is None or len(word) > MAX_NUMBER:
        raise Malformed("neither a number nor true, false, null")
    if found.group(1) is None and found.group(2) is None:
        return int(word)
    return finite(word)


def finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise Malformed("a number is out of range")
    return value


class _Json:
    brackets: Mapping[str, str] = {"{": "}", "[": "]"}
    allows_trailing_comma = False
    plain: regex.Pattern[str] | None = regex.compile(
        r'(-?(?:0|[1-9][0-9]{0,17}))(?=[,}\]])|"([^"\\]*+)"'
    )

    def scalar(self, source: Source) -> Reader[object]:
        if source.text[source.pos] == '"':
            return (yield from read_string(source))
        return json_scalar((yield from read_run(source, NUMBER_RUN, MAX_NUMBER)))

    def key(self, source: Source) -> Reader[str | SetItem]:
        key = yield from read_string(source)
        if (source.glance() or (yield from source.token())) != ":":
            raise Malformed("expected a colon")
        source.pos += 1
        return key


JSON: Syntax = _Json()


def parse_json(text: str, *, unique: bool = False) -> Any:
    """The one JSON value that `text` is, blanks around it allowed. Raises `Malformed`."""
    return parse(text, JSON, unique=unique)


def parse(text: str, syntax: Syntax, *, unique: bool = False) -> Any:
    """The one value that `text` is, blanks around it allowed. Raises `Malformed`."""
    source = Source()
    # A final blank tells a number's end from a number that goes on.
    source.feed(text + "\n")
    source.ended = True
    try:
        value = run(read_value(source, syntax, unique=unique))
        run(source.blanks())
    except Cut as cut:
        raise Malformed("incomplete") from cut
    if source.pos < source.end:
        raise Malformed("text follows the value")
    return value
