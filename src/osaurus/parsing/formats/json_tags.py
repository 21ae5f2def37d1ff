"""JSON in tags (Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4, Ling 2): one object an envelope."""

from __future__ import annotations

from collections.abc import Generator

import regex

from osaurus.parsing.bodies.json_calls import JSON_START, read_enveloped
from osaurus.parsing.call_syntax import json_calls
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.source import Source

COMMIT = regex.compile(GAP + JSON_START)


def json_opener(opener: str, closer: str) -> Opener:
    def read(source: Source, calls: Calls) -> Generator[None, None, None]:
        return read_enveloped(source, calls, closer)

    return Opener(marker=opener, commit=COMMIT, read=read, closers=(closer,))


def _tagged(name: str, tag: str) -> ToolFormat:
    opener, closer = f"<{tag}>", f"</{tag}>"
    return ToolFormat(
        name=name,
        openers=(json_opener(opener, closer),),
        orphans=(closer,),
        writes=(json_calls(open=f"{opener}\n", close=f"\n{closer}", between="\n"),),
    )


JSON_TAGS = _tagged("json", "tool_call")
LONGCAT = _tagged("longcat", "longcat_tool_call")
#: Granite 20B.
FUNCTION_CALL = _tagged("function_call", "function_call")
#: Nemotron Nano v2 writes an array.
TOOLCALL = _tagged("nemotron_v2", "TOOLCALL")
