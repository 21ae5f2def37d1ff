"""Calls written in Python syntax: `[f(a=1, b='x'), g()]`. Literals only, nothing is evaluated."""

from __future__ import annotations

from typing import Any

import regex

from osaurus.parsing.calls import Calls
from osaurus.parsing.python_values import PYTHON
from osaurus.parsing.source import MAX_GAP, Malformed, Reader, Source
from osaurus.parsing.values import MAX_NAME, read_value

#: The start of a call: a name, dotted or not, and a parenthesis.
CALL_START = rf"[A-Za-z_][A-Za-z0-9_.]{{0,{MAX_NAME}}}[ \t]{{0,8}}\("
_GAP = rf"[ \t\r\n]{{0,{MAX_GAP}}}"
_CALL_START = regex.compile(CALL_START)
_KEYWORD = regex.compile(rf"([A-Za-z_][A-Za-z0-9_]{{0,{MAX_NAME}}}){_GAP}=")
_NEXT_CALL = regex.compile(rf"{_GAP},?{_GAP}{CALL_START}")


def read_list(source: Source, calls: Calls) -> Reader[None]:
    """A bracketed list of calls, each added when it ends."""
    yield from source.expect("[")
    yield from source.blanks()
    if (yield from source.at("]")):
        raise Malformed("a list without a call")
    while True:
        yield from read_call(source, calls)
        yield from source.blanks()
        if (yield from source.expect(",", "]")) == "]":
            return
        yield from source.blanks()
        if (yield from source.take("]")):
            return


def read_row(source: Source, calls: Calls) -> Reader[None]:
    """Calls without brackets, one a line or with commas between."""
    while True:
        yield from read_call(source, calls)
        if not (yield from source.ahead(_NEXT_CALL)):
            return
        yield from source.blanks()
        yield from source.take(",")
        yield from source.blanks()


def read_call(source: Source, calls: Calls, *, method: str = "") -> Reader[None]:
    """One call. `method` is a suffix of the written name that is protocol (`.call`)."""
    found = yield from source.ahead(_CALL_START)
    if found is None:
        # At the end of the stream a name may have been cut, which `peek` tells from a fault.
        yield from source.peek()
        raise Malformed("expected a call")
    written = found.group()[:-1].strip()
    source.pos += len(found.group())
    if method and written.endswith(method):
        written = written[: -len(method)]
    name = calls.name(written)
    arguments = yield from _read_arguments(source, calls, name)
    calls.add(name, calls.tools.restore(name, arguments))


def _read_arguments(source: Source, calls: Calls, name: str) -> Reader[dict[str, Any]]:
    """Keyword arguments up to and with the closing parenthesis.

    One positional string stands for the first required argument; any other positional
    argument, and a repeated keyword, make it no call.
    """
    arguments: dict[str, Any] = {}
    has_positional = False
    while True:
        if (yield from source.token()) == ")":
            source.pos += 1
            return arguments
        found = yield from source.ahead(_KEYWORD)
        if found is not None:
            key = found.group(1)
            source.pos += len(found.group())
        else:
            key = next(iter(calls.tools.required(name)), "")
            if has_positional or arguments or not key:
                raise Malformed("a positional argument")
            has_positional = True
        value = yield from read_value(source, PYTHON)
        if key in arguments:
            raise Malformed("a keyword is repeated")
        if found is None and not isinstance(value, str):
            raise Malformed("a positional argument")
        arguments[key] = value
        yield from source.blanks()
        if (yield from source.at(")")):
            continue
        yield from source.expect(",")
