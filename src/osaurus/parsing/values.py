"""Reading one value: JSON, Python literals, and the Gemma notation, as text arrives.

One loop with an explicit stack reads the brackets of all three, so nesting costs no recursion;
a `Syntax` says what a scalar and a key look like. Strict: nothing is repaired, closed or
guessed. `NaN`, infinities and halves of surrogate pairs are no values, since no JSON text
could carry them on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from json import JSONDecodeError, JSONDecoder
from typing import Any, Protocol, cast

import regex

from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.source import Cut, Malformed, Reader, Source, run

#: Deeper values than this are malformed: what reads them later may recurse.
MAX_DEPTH = 128
#: Longest key or function name that is read.
MAX_NAME = 256
#: Longest spelling of a number. Python itself refuses integers past 4,300 digits.
MAX_NUMBER = 4300

_STRING_BODY = regex.compile(r'(?:[^"\\]++|\\.)*+', regex.DOTALL)
_JSON_NUMBER = regex.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_RUN = regex.compile(r"[-+.0-9A-Za-z_]*+")
#: Models write real line breaks in strings.
_ANY_CONTROL = JSONDecoder(strict=False)
_SURROGATE = regex.compile("[\ud800-\udfff]")
_JSON_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None}


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
        found = _STRING_BODY.match(source.text, source.pos, source.end)
        stop = found.end() if found else source.pos
        parts.append(source.text[source.pos : stop])
        length += stop - source.pos
        source.pos = stop
        if at_most is not None and length > at_most:
            raise Malformed(f"a name is longer than {at_most} characters")
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
    if _SURROGATE.search(text):
        raise Malformed("half of a surrogate pair")
    return text


def read_run(source: Source, pattern: regex.Pattern[str], at_most: int) -> Reader[str]:
    """The characters that `pattern` (a possessive run) matches from here."""
    parts: list[str] = []
    length = 0
    while True:
        found = pattern.match(source.text, source.pos, source.end)
        stop = found.end() if found else source.pos
        parts.append(source.text[source.pos : stop])
        length += stop - source.pos
        source.pos = stop
        if length > at_most:
            raise Malformed(f"a scalar is longer than {at_most} characters")
        if stop < source.end:
            return "".join(parts)
        yield from source.more()


def json_scalar(word: str) -> object:
    """The value of a JSON number, `true`, `false` or `null`. Raises `Malformed`."""
    if word in _JSON_WORDS:
        return _JSON_WORDS[word]
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
        return json_scalar((yield from read_run(source, _NUMBER_RUN, MAX_NUMBER)))

    def key(self, source: Source) -> Reader[str | SetItem]:
        key = yield from read_string(source)
        if (source.glance() or (yield from source.token())) != ":":
            raise Malformed("expected a colon")
        source.pos += 1
        return key


JSON: Syntax = _Json()

_PY_WORDS: Mapping[str, object] = {**_JSON_WORDS, "True": True, "False": False, "None": None}
_PY_INTEGER = regex.compile(r"[+-]?(?:[0-9]+(?:_[0-9]+)*|0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+)")
_PY_FLOAT = regex.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_PY_STRING_BODY = {
    quote: regex.compile(rf"(?:[^{quote}\\]++|\\.)*+", regex.DOTALL) for quote in ("'", '"')
}
_PY_ESCAPE = regex.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|(\r?\n)|(.))",
    regex.DOTALL,
)
_PY_ESCAPES = {
    "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r",
    "t": "\t", "v": "\v",
}  # fmt: skip


class _Python:
    brackets: Mapping[str, str] = {"{": "}", "[": "]", "(": ")"}
    allows_trailing_comma = True
    plain: regex.Pattern[str] | None = None

    def scalar(self, source: Source) -> Reader[object]:
        char = source.text[source.pos]
        if char in "'\"":
            return (yield from self._string(source, char))
        return python_scalar((yield from read_run(source, _NUMBER_RUN, MAX_NUMBER)))

    def key(self, source: Source) -> Reader[str | SetItem]:
        value = yield from self.scalar(source)
        if (source.glance() or (yield from source.token())) != ":":
            return SetItem(value)
        source.pos += 1
        return _key_text(value)

    def _string(self, source: Source, quote: str) -> Reader[str]:
        """A string without prefix; three quotes open one that holds single ones."""
        found = yield from source.take(quote * 3, quote * 2, quote)
        if len(found) == 2:
            return ""
        body = _PY_STRING_BODY[quote]
        parts: list[str] = []
        while True:
            run_ = body.match(source.text, source.pos, source.end)
            stop = run_.end() if run_ else source.pos
            parts.append(source.text[source.pos : stop])
            source.pos = stop
            if stop < source.end and source.text[stop] == quote:
                if (yield from source.take(found)):
                    return unescape_python("".join(parts))
                parts.append(quote)
                source.pos += 1
                continue
            yield from source.more()


PYTHON: Syntax = _Python()


def python_scalar(word: str) -> object:
    """A number or keyword of Python or JSON. Anything else, a name say, is `Malformed`."""
    if word in _PY_WORDS:
        return _PY_WORDS[word]
    if _PY_INTEGER.fullmatch(word) and len(word) < MAX_NUMBER:
        digits = word.replace("_", "")
        return int(digits, 10 if digits.lstrip("+-").isdigit() else 0)
    if _PY_FLOAT.fullmatch(word):
        return finite(word)
    raise Malformed("not a literal")


def _key_text(value: object) -> str:
    """A dictionary key as JSON would spell it."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def unescape_python(raw: str) -> str:
    """The value of a string literal's body. Unknown escapes stay as they are, as in Python."""
    if "\\" not in raw:
        return raw

    def replace(found: regex.Match[str]) -> str:
        for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
            digits = found.group(group)
            if digits:
                code = int(digits, base)
                if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                    raise Malformed("an escape names no character")
                return chr(code)
        if found.group(5):
            return ""
        return _PY_ESCAPES.get(found.group(6), found.group())

    return _PY_ESCAPE.sub(replace, raw)


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


def parse_json(text: str, *, unique: bool = False) -> Any:
    """The one JSON value that `text` is, blanks around it allowed. Raises `Malformed`."""
    return _parse(text, JSON, unique)


def parse_python(text: str) -> Any:
    """The one literal that `text` is, tuples and sets as lists. Raises `Malformed`."""
    return _parse(text, PYTHON, False)


def _parse(text: str, syntax: Syntax, unique: bool) -> Any:
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
