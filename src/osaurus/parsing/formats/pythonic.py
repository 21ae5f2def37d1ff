"""Python lists of calls: Llama 4 and ToolACE bare or in python tags, OLMo 3 one call a line.

Llama 4 also writes the JSON objects of its predecessors, in the tags or without them.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import read_bare, read_object
from osaurus.parsing.bodies.python_calls import CALL_START, read_list, read_row
from osaurus.parsing.call_syntax import IDENTIFIER, CallSyntax
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.bare_json import COMMIT as JSON_COMMIT
from osaurus.parsing.formats.base import GAP, BareOpener, BodyReader, Opener, ToolFormat
from osaurus.parsing.source import Reader, Source

_OBJECT = r'\{[ \t\r\n]{0,64}"'
_BARE_COMMIT = regex.compile(rf"\[[ \t\r\n]{{0,64}}{CALL_START}")
_COMMIT = regex.compile(rf"{GAP}(?:\[[ \t\r\n]{{0,64}}[A-Za-z_]|{CALL_START}|{_OBJECT})")


def _read_bare(source: Source, calls: Calls) -> Reader[None]:
    yield from read_list(source, calls)
    calls.is_closed = True


def _read_objects(source: Source, calls: Calls) -> Reader[None]:
    return read_bare(source, calls, separator=";")


def _wrapped(closer: str) -> BodyReader:
    def read(source: Source, calls: Calls) -> Reader[None]:
        first = yield from source.token()
        if first == "[":
            yield from read_list(source, calls)
        elif first == "{":
            yield from read_object(source, calls)
        else:
            yield from read_row(source, calls)
        calls.is_closed = bool((yield from source.closer(closer)))

    return read


def _opener(opener: str, closer: str) -> Opener:
    return Opener(marker=opener, commit=_COMMIT, read=_wrapped(closer), closers=(closer,))


def _python(begin: str, end: str, between: str, needs: tuple[str, ...] = ()) -> CallSyntax:
    return CallSyntax(
        begin=begin,
        open="",
        middle="(",
        close=")",
        between=between,
        end=end,
        arguments="python",
        names=rf"{IDENTIFIER}(?:\.{IDENTIFIER})*",
        needs=needs,
    )


PYTHONIC = ToolFormat(
    name="pythonic",
    openers=(
        _opener("<|python_start|>", "<|python_end|>"),
        _opener("<function_calls>", "</function_calls>"),
    ),
    bare=(
        BareOpener(starts="[", commit=_BARE_COMMIT, read=_read_bare),
        BareOpener(starts="{", commit=JSON_COMMIT, read=_read_objects),
    ),
    orphans=("<|python_end|>", "</function_calls>"),
    writes=(
        _python("<function_calls>", "</function_calls>", "\n", ("<function_calls>",)),
        _python("[", "]", ", "),
    ),
)
