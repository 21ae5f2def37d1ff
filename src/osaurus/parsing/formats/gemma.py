"""FunctionGemma: `<start_function_call>call:NAME{...}<end_function_call>`."""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.gemma_calls import CALL_START, read_calls
from osaurus.parsing.call_syntax import CallSyntax
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.gemma_values import Delimited
from osaurus.parsing.source import Reader, Source

_CLOSER = "<end_function_call>"
_SYNTAX = Delimited("<escape>", _CLOSER)


def _read(source: Source, calls: Calls) -> Reader[None]:
    return read_calls(source, calls, _SYNTAX, (_CLOSER,))


GEMMA = ToolFormat(
    name="gemma",
    openers=(
        Opener(
            marker="<start_function_call>",
            commit=regex.compile(GAP + CALL_START),
            read=_read,
            closers=(_CLOSER,),
        ),
    ),
    orphans=(_CLOSER,),
    writes=(
        CallSyntax(
            open="<start_function_call>call:",
            middle="",
            close=_CLOSER,
            arguments="braces",
            quote="<escape>",
            names=r"[A-Za-z0-9_.\-]{1,64}",
        ),
    ),
)
