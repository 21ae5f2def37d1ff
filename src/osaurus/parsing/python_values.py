"""Python literals: strings of either quote, numbers, lists, tuples, sets, dictionaries.

Names, expressions and prefixes are no literals; nothing is evaluated. `true`, `false`, `null` are
read as well, tuples and sets become lists, keys become what JSON would write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from osaurus.parsing.source import Malformed, Reader, Source
from osaurus.parsing.values import (
    JSON_WORDS,
    MAX_NUMBER,
    NUMBER_RUN,
    SetItem,
    Syntax,
    finite,
    parse,
    read_run,
)

_PY_WORDS: Mapping[str, object] = {**JSON_WORDS, "True": True, "False": False, "None": None}
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
        return python_scalar((yield from read_run(source, NUMBER_RUN, MAX_NUMBER)))

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


def parse_python(text: str) -> Any:
    """The one literal that `text` is, tuples and sets as lists. Raises `Malformed`."""
    return parse(text, PYTHON)
