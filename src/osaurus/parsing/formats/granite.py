"""Granite: 3.0 `<|tool_call|>[...]`, 3.1 to 3.3 `<tool_call>[...]` mostly without closer,
4.0 as JSON in tags, 4.2 with the XML function body.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import read_enveloped
from osaurus.parsing.bodies.xml_calls import read_functions
from osaurus.parsing.call_syntax import json_calls
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.formats.xml_function import qwen_syntax
from osaurus.parsing.source import Reader, Source

_CLOSER = "</tool_call>"
_SYNTAX = qwen_syntax(_CLOSER)
_ARRAY = r"\[[ \t\r\n]{0,64}[{\]]"
_COMMIT = regex.compile(rf"{GAP}(?:{_ARRAY}|\{{|<function=)")
_TAG_COMMIT = regex.compile(rf'{GAP}(?:{_ARRAY}|\{{[ \t\r\n]{{0,64}}["}}]|<function=)')


def _read(source: Source, calls: Calls) -> Reader[None]:
    if (yield from source.token()) == "<":
        yield from read_functions(source, calls, _SYNTAX)
        return
    yield from read_enveloped(source, calls, _CLOSER)
    # The closer is optional: the JSON ends the envelope.
    calls.is_closed = True


GRANITE = ToolFormat(
    name="granite",
    openers=(
        Opener(marker="<|tool_call|>", commit=_COMMIT, read=_read, closers=(_CLOSER,)),
        Opener(marker="<tool_call>", commit=_TAG_COMMIT, read=_read, closers=(_CLOSER,)),
    ),
    orphans=(_CLOSER,),
    writes=(
        json_calls("<|tool_call|>[", "]", between=", ", needs=("<|tool_call|>",)),
        json_calls(open="<tool_call>\n", close=f"\n{_CLOSER}", between="\n"),
    ),
)
