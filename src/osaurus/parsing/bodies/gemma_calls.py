"""Calls in Gemma's notation: `call:NAME{key:value,...}`, strings between delimiters."""

from __future__ import annotations

import regex

from osaurus.parsing.calls import Calls
from osaurus.parsing.source import MAX_GAP, Malformed, Reader, Source
from osaurus.parsing.values import MAX_NAME, Syntax, read_run, read_value

_NAME_CHARS = r"[A-Za-z0-9_.\-]"
#: What an envelope of this notation begins with.
CALL_START = rf"call:{_NAME_CHARS}"
_NAME = regex.compile(rf"{_NAME_CHARS}*+")
_NEXT_CALL = regex.compile(rf"[ \t\r\n]{{0,{MAX_GAP}}}{CALL_START}")


def read_calls(
    source: Source, calls: Calls, syntax: Syntax, closers: tuple[str, ...]
) -> Reader[None]:
    """Calls up to and with the envelope's closer, if that is there."""
    while True:
        yield from source.blanks()
        yield from source.expect("call:")
        name = calls.name((yield from read_run(source, _NAME, MAX_NAME)))
        yield from source.blanks()
        # Drift seen in the field: the arguments in parentheses.
        is_wrapped = bool((yield from source.take("(")))
        if (yield from source.token()) != "{":
            raise Malformed("expected arguments in braces")
        arguments = yield from read_value(source, syntax)
        if is_wrapped:
            yield from source.blanks()
            yield from source.expect(")")
        calls.add(name, calls.tools.restore(name, arguments))
        if not (yield from source.ahead(_NEXT_CALL, drops_cut=True)):
            break
    calls.is_closed = bool((yield from source.closer(*closers)))
