"""Gemma 4 and DiffusionGemma: `<|tool_call>call:NAME{...}<tool_call|>`, several in one envelope.

Two drifts of live checkpoints are read: the opener `<|tool_call|>` and arguments in
parentheses. In a delimited string anything is data, the closer too.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.gemma_calls import CALL_START, read_calls
from osaurus.parsing.call_syntax import CallSyntax
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.gemma_values import Delimited
from osaurus.parsing.source import Reader, Source

_CLOSER = "<tool_call|>"
_SYNTAX = Delimited('<|"|>', _CLOSER)


def _read(source: Source, calls: Calls) -> Reader[None]:
    return read_calls(source, calls, _SYNTAX, (_CLOSER,))


GEMMA4 = ToolFormat(
    name="gemma4",
    openers=tuple(
        Opener(
            marker=marker,
            commit=regex.compile(GAP + CALL_START),
            read=_read,
            closers=(_CLOSER,),
        )
        for marker in ("<|tool_call>", "<|tool_call|>")
    ),
    orphans=(_CLOSER,),
    writes=(
        CallSyntax(
            open="<|tool_call>call:",
            middle="",
            close=_CLOSER,
            arguments="braces",
            quote='<|"|>',
            names=r"[A-Za-z0-9_.\-]{1,64}",
        ),
    ),
)
