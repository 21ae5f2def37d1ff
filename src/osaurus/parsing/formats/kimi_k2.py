"""Kimi K2, K2 Thinking, K2.5 and K2.6: a call's id carries its name and a running number.

The id (`functions.NAME:N`) is kept as the call's id, because the next prompt has to show the
same one. K3 is another format and not this one.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.sections import SectionTokens, read_section
from osaurus.parsing.call_syntax import INDEX, CallSyntax
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.source import Reader, Source

_TOKENS = SectionTokens(
    section_open="<|tool_calls_section_begin|>",
    section_close="<|tool_calls_section_end|>",
    call_open="<|tool_call_begin|>",
    call_close="<|tool_call_end|>",
    separator="<|tool_call_argument_begin|>",
)
_ID = regex.compile(r"(?:functions\.)?([\s\S]*?)(?::[0-9]+)?")
_CLOSERS = (_TOKENS.section_close, _TOKENS.call_close)


def _read_head(source: Source, head: str) -> Reader[tuple[str, str | None]]:
    call_id = head.strip()
    found = _ID.fullmatch(call_id)
    yield from ()
    return (found.group(1) if found else call_id), call_id


def _read_section(source: Source, calls: Calls) -> Reader[None]:
    return read_section(source, calls, _TOKENS, _read_head, in_call=False)


def _read_call(source: Source, calls: Calls) -> Reader[None]:
    return read_section(source, calls, _TOKENS, _read_head, in_call=True)


KIMI_K2 = ToolFormat(
    name="kimi_k2",
    openers=(
        Opener(
            marker=_TOKENS.section_open,
            commit=regex.compile(GAP + regex.escape(_TOKENS.call_open)),
            read=_read_section,
            closers=_CLOSERS,
        ),
        Opener(
            marker=_TOKENS.call_open,
            commit=regex.compile(""),
            read=_read_call,
            closers=(_TOKENS.call_close,),
        ),
    ),
    orphans=_CLOSERS,
    own_id=regex.compile(r"[\s\S]+"),
    writes=(
        CallSyntax(
            begin=_TOKENS.section_open,
            open=f"{_TOKENS.call_open}functions.",
            middle=f":{INDEX}{_TOKENS.separator}",
            close=_TOKENS.call_close,
            end=_TOKENS.section_close,
            names=r"[A-Za-z0-9_.\-]{1,64}",
        ),
    ),
)
