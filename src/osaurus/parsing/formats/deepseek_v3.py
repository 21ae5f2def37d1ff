"""DeepSeek V3 and R1 (type, name, fenced JSON) and V3.1 (name, JSON); one reader takes both.

<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.sections import SectionTokens, read_section
from osaurus.parsing.call_syntax import CallSyntax
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.source import Reader, Source
from osaurus.parsing.values import MAX_NAME

_TOKENS = SectionTokens(
    section_open="<｜tool▁calls▁begin｜>",
    section_close="<｜tool▁calls▁end｜>",
    call_open="<｜tool▁call▁begin｜>",
    call_close="<｜tool▁call▁end｜>",
    separator="<｜tool▁sep｜>",
)
_LINE_END = MarkerSet(["\n"])
_CLOSERS = (_TOKENS.section_close, _TOKENS.call_close)


def _read_head(source: Source, head: str) -> Reader[tuple[str, str | None]]:
    """In V3.1 the JSON follows at once; in V3 a name line and a fence do."""
    if (yield from source.token()) == "{" or (yield from source.at(*_CLOSERS)):
        return head, None
    name, _ = yield from source.until(_LINE_END, at_most=MAX_NAME)
    yield from source.blanks()
    yield from source.take("```json", "```")
    return name, None


def _read_section(source: Source, calls: Calls) -> Reader[None]:
    return read_section(source, calls, _TOKENS, _read_head, in_call=False)


def _read_call(source: Source, calls: Calls) -> Reader[None]:
    return read_section(source, calls, _TOKENS, _read_head, in_call=True)


def _syntax(head: str, middle: str, close: str) -> CallSyntax:
    return CallSyntax(
        begin=_TOKENS.section_open,
        open=_TOKENS.call_open + head,
        middle=middle,
        close=close + _TOKENS.call_close,
        end=_TOKENS.section_close,
        names=r"[A-Za-z0-9_.\-]{1,64}",
    )


_V3 = _syntax(f"function{_TOKENS.separator}", "\n```json\n", "\n```")
_V31 = _syntax("", _TOKENS.separator, "")


def _format(name: str, syntax: CallSyntax) -> ToolFormat:
    return ToolFormat(
        name=name,
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
        writes=(syntax,),
    )


DEEPSEEK_V3 = _format("deepseek_v3", _V3)
DEEPSEEK_V31 = _format("deepseek_v31", _V31)
