"""Llama 3.1 to 3.3: `<|python_tag|>` or nothing before the JSON object, `;` between several.

A calling turn ends with `<|eom_id|>`, which is a stop id and not seen here. Raw code behind
the tag is for a code interpreter and is prose.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import read_bare, read_object
from osaurus.parsing.bodies.python_calls import read_call
from osaurus.parsing.call_syntax import json_calls
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.bare_json import COMMIT as BARE_COMMIT
from osaurus.parsing.formats.base import GAP, BareOpener, Opener, ToolFormat
from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.source import Malformed, Reader, Source
from osaurus.parsing.values import JSON, MAX_NAME, read_value

_NAME = r"[A-Za-z_][A-Za-z0-9_.]{0,255}"
_COMMIT = regex.compile(rf"{GAP}(?:\{{|{_NAME}\.call\()")
_NEXT = regex.compile(rf"{GAP};{GAP}\{{")
_FUNCTION_COMMIT = regex.compile(rf"[^<>\r\n]{{1,{MAX_NAME}}}>{GAP}\{{")
_NAME_END = MarkerSet([">"])


def _read_tagged(source: Source, calls: Calls) -> Reader[None]:
    calls.is_closed = True
    if (yield from source.token()) != "{":
        # A built-in: the tool is what stands before `.call`.
        yield from read_call(source, calls, method=".call")
        return
    yield from read_object(source, calls)
    while (yield from source.ahead(_NEXT, drops_cut=True)):
        yield from source.blanks()
        yield from source.expect(";")
        yield from source.blanks()
        yield from read_object(source, calls)


def _read_untagged(source: Source, calls: Calls) -> Reader[None]:
    return read_bare(source, calls, separator=";")


def _read_function(source: Source, calls: Calls) -> Reader[None]:
    """`<function=NAME>{json}</function>`, the custom form of 3.1."""
    raw, _ = yield from source.until(_NAME_END, at_most=MAX_NAME)
    name = calls.name(raw)
    yield from source.blanks()
    arguments = yield from read_value(source, JSON)
    if not isinstance(arguments, dict):
        raise Malformed("arguments are not an object")
    calls.add(name, arguments)
    yield from source.closer("</function>")
    calls.is_closed = True


LLAMA3 = ToolFormat(
    name="llama3",
    openers=(Opener(marker="<|python_tag|>", commit=_COMMIT, read=_read_tagged),),
    bare=(
        BareOpener(starts="{[", commit=BARE_COMMIT, read=_read_untagged),
        BareOpener(
            marker="<function=",
            commit=_FUNCTION_COMMIT,
            read=_read_function,
            closers=("</function>",),
        ),
    ),
    writes=(json_calls(arguments="parameters", between="; "),),
)
