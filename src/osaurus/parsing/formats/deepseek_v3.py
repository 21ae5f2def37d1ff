"""DeepSeek V3 and R1 (type, name, fenced JSON) and V3.1 (name, JSON); one reader takes both.

<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.sections import SectionTokens, read_section
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


def _format(name: str) -> ToolFormat:
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
    )


DEEPSEEK_V3 = _format("deepseek_v3")
DEEPSEEK_V31 = _format("deepseek_v31")
