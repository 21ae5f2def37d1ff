"""Calls written as a head, a separator and JSON between special tokens: Kimi and DeepSeek.

    SECTION ( CALL head SEPARATOR {json} CALL_END )+ SECTION_END

The section's own tokens may be missing. A bad call does not spoil its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from osaurus.parsing.calls import Calls, object_arguments
from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.source import Malformed, Reader, Source
from osaurus.parsing.values import JSON, MAX_NAME, read_value


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionTokens:
    section_open: str
    section_close: str
    call_open: str
    call_close: str
    separator: str


#: Reads what stands between the separator and the JSON. In: source, the head's text.
#: Out: the function's name as written, its id if the head has one.
HeadReader = Callable[[Source, str], Reader[tuple[str, str | None]]]


def read_section(
    source: Source, calls: Calls, tokens: SectionTokens, read_head: HeadReader, *, in_call: bool
) -> Reader[None]:
    """Calls up to and with the section's closer; `in_call` behind a call's own opener."""
    head_stops = MarkerSet([tokens.separator, tokens.call_close, tokens.section_close])
    resync = MarkerSet([tokens.call_open, tokens.call_close, tokens.section_close])
    found = tokens.call_open
    if not in_call:
        yield from source.blanks()
        found = yield from source.expect(tokens.call_open)
    while found == tokens.call_open:
        try:
            yield from _read_call(source, calls, tokens, head_stops, read_head)
        except Malformed as error:
            calls.bad = str(error)
            _, found = yield from source.until(resync)
        else:
            found = yield from source.closer(
                tokens.call_close, tokens.call_open, tokens.section_close
            )
        if found == tokens.call_close:
            calls.is_closed = in_call
            found = yield from source.closer(tokens.call_open, tokens.section_close)
    calls.is_closed = calls.is_closed or found == tokens.section_close


def _read_call(
    source: Source,
    calls: Calls,
    tokens: SectionTokens,
    head_stops: MarkerSet,
    read_head: HeadReader,
) -> Reader[None]:
    head, stop = yield from source.until(head_stops, at_most=MAX_NAME)
    if stop != tokens.separator:
        # Leave the token to the resynchronisation.
        source.pos -= len(stop)
        raise Malformed("a call without a separator")
    raw, call_id = yield from read_head(source, head)
    name = calls.name(raw)
    yield from source.blanks()
    arguments: Any = None
    ends = (tokens.call_close, tokens.call_open, tokens.section_close)
    if not (yield from source.at(*ends)):
        arguments = object_arguments((yield from read_value(source, JSON)))
        yield from source.blanks()
        if (yield from source.take("```")):
            yield from source.blanks()
        if not (yield from source.at(*ends)):
            if not _is_cut(source, *ends, "```"):
                raise Malformed("text follows the arguments")
            source.pos = source.end
    calls.add(name, arguments or {}, call_id)


def _is_cut(source: Source, *markers: str) -> bool:
    """Whether the stream ended where one of `markers` was expected or half written."""
    rest = source.text[source.pos : source.end]
    return source.ended and any(marker.startswith(rest) for marker in markers)
