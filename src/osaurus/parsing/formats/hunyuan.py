"""Hunyuan A13B (a JSON array) and Hy3 (names and key-value tags), both in `<tool_calls>`.

Open packs of Hy3 suffix every tag with `:opensource`; within an envelope that is constant.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import read_array
from osaurus.parsing.bodies.tag_pairs import PairTags, read_pairs
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.source import Malformed, Reader, Source
from osaurus.parsing.values import MAX_NAME


def _opener(suffix: str) -> Opener:
    tags = PairTags(suffix)
    closer = f"</tool_calls{suffix}>"
    following = regex.compile(GAP + regex.escape(tags.call_open))

    def read(source: Source, calls: Calls) -> Reader[None]:
        if (yield from source.token()) == "[":
            yield from read_array(source, calls)
        else:
            while True:
                yield from source.blanks()
                yield from source.expect(tags.call_open)
                raw, stop = yield from source.until(tags.name_end, at_most=MAX_NAME)
                name = calls.name(raw)
                if stop == tags.call_close:
                    calls.add(name, {})
                elif stop == tags.separator:
                    yield from read_pairs(source, calls, tags, name)
                else:
                    raise Malformed("a name without a separator")
                if not (yield from source.ahead(following)):
                    break
        calls.is_closed = bool((yield from source.closer(closer)))

    return Opener(
        marker=f"<tool_calls{suffix}>",
        commit=regex.compile(rf"{GAP}(?:{regex.escape(tags.call_open)}|\[)"),
        read=read,
        closers=(closer,),
    )


HUNYUAN = ToolFormat(
    name="hunyuan",
    openers=(_opener(""), _opener(":opensource")),
    orphans=("</tool_calls>", "</tool_calls:opensource>"),
    # A13B wraps what it says in these.
    wrappers=("<answer>", "</answer>"),
)
