"""Calls written as JSON objects: one, several in a row, or an array of them."""

from __future__ import annotations

import regex

from osaurus.parsing.calls import Calls
from osaurus.parsing.source import MAX_GAP, Malformed, NotACall, Reader, Source
from osaurus.parsing.values import JSON, MAX_NAME, read_string, read_value

_BARE_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_GAP = rf"[ \t\r\n]{{0,{MAX_GAP}}}"
_NEXT_OBJECT = regex.compile(rf'{_GAP}\{{[ \t\r\n]{{0,64}}"')
#: What a JSON body in an envelope begins with: an object or an array of objects.
JSON_START = r'(?:\{[ \t\r\n]{0,64}["}]|\[[ \t\r\n]{0,64}[{\]])'


def read_enveloped(
    source: Source, calls: Calls, *closers: str, skip_nameless: bool = False
) -> Reader[None]:
    """A JSON body up to and with its closer, if that is there; calls count as they end."""
    if (yield from source.token()) == "[":
        yield from read_array(source, calls, skip_nameless=skip_nameless)
    else:
        yield from read_object(source, calls)
        while (yield from source.ahead(_NEXT_OBJECT, drops_cut=True)):
            yield from source.blanks()
            yield from read_object(source, calls)
    closed = yield from source.closer(*closers)
    calls.is_closed = bool(closed) or not closers


def read_array(source: Source, calls: Calls, *, skip_nameless: bool = False) -> Reader[None]:
    """An array of call objects, each added when it ends."""
    yield from source.expect("[")
    if (yield from source.token()) == "]":
        raise Malformed("an array without a call")
    while True:
        yield from read_object(source, calls, skip_nameless=skip_nameless)
        yield from source.blanks()
        if (yield from source.expect(",", "]")) == "]":
            return
        yield from source.blanks()


def read_object(source: Source, calls: Calls, *, skip_nameless: bool = False) -> Reader[None]:
    """One call object."""
    fields = yield from _read_fields(source, calls, None)
    if skip_nameless and not isinstance(fields.get("name"), str) and "function" not in fields:
        return
    calls.add_object(fields)


def read_bare(source: Source, calls: Calls, *, separator: str = "") -> Reader[None]:
    """Call objects without any marker around them: one, an array, or some in a row.

    Every key has to be one of a call's, the arguments have to be there, the name offered.
    `separator` may stand between objects (Llama writes `;`).
    """
    calls.is_closed = True
    if (yield from source.take("[")):
        while True:
            yield from source.blanks()
            yield from _bare_object(source, calls)
            yield from source.blanks()
            if (yield from source.expect(",", "]")) == "]":
                return
    yield from _bare_object(source, calls)
    if not separator:
        return
    following = regex.compile(rf"{_GAP}{regex.escape(separator)}{_GAP}\{{")
    while (yield from source.ahead(following)):
        yield from source.blanks()
        yield from source.expect(separator)
        yield from source.blanks()
        yield from _bare_object(source, calls)


def _bare_object(source: Source, calls: Calls) -> Reader[None]:
    fields = yield from _read_fields(source, calls, _BARE_KEYS)
    if "name" not in fields or not fields.keys() & {"arguments", "parameters"}:
        raise NotACall
    calls.add_object(fields)


def _read_fields(
    source: Source, calls: Calls, allowed: frozenset[str] | None
) -> Reader[dict[str, object]]:
    """The members of an object. Keys and the name are judged as soon as they are read."""
    yield from source.expect("{")
    fields: dict[str, object] = {}
    if (yield from source.token()) == "}":
        source.pos += 1
        return fields
    while True:
        key = yield from read_string(source, at_most=MAX_NAME)
        if allowed is not None and key not in allowed:
            raise NotACall
        yield from source.blanks()
        yield from source.expect(":")
        if (yield from source.token()) == '"' and key == "name":
            name = yield from read_string(source, at_most=MAX_NAME)
            calls.name(name)
            fields[key] = name
        else:
            fields[key] = yield from read_value(source, JSON)
        yield from source.blanks()
        if (yield from source.expect(",", "}")) == "}":
            return fields
        yield from source.blanks()
