"""LFM2 and LFM2.5: a Python list of calls between two special tokens, sometimes a JSON list.

An envelope that names a tool which was not offered is neither executed nor shown.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import read_enveloped
from osaurus.parsing.bodies.python_calls import CALL_START, read_list, read_row
from osaurus.parsing.call_syntax import IDENTIFIER, CallSyntax
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.source import Reader, Source

_CLOSER = "<|tool_call_end|>"
_BLANKS = r"[ \t\r\n]{0,64}"
_JSON = regex.compile(rf"{GAP}(?:\[{_BLANKS})?\{{")
_COMMIT = regex.compile(rf'{GAP}(?:\[{_BLANKS}[A-Za-z_{{]|{CALL_START}|\{{{_BLANKS}")')


def _read(source: Source, calls: Calls) -> Reader[None]:
    if (yield from source.ahead(_JSON)):
        yield from read_enveloped(source, calls, _CLOSER)
        return
    if (yield from source.token()) == "[":
        yield from read_list(source, calls)
    else:
        yield from read_row(source, calls)
    calls.is_closed = bool((yield from source.closer(_CLOSER)))


LFM2 = ToolFormat(
    name="lfm2",
    openers=(Opener(marker="<|tool_call_start|>", commit=_COMMIT, read=_read, closers=(_CLOSER,)),),
    orphans=(_CLOSER,),
    unknown="drop",
    writes=(
        CallSyntax(
            begin="<|tool_call_start|>[",
            open="",
            middle="(",
            close=")",
            between=", ",
            end=f"]{_CLOSER}",
            arguments="python",
            names=rf"{IDENTIFIER}(?:\.{IDENTIFIER})*",
        ),
    ),
)
