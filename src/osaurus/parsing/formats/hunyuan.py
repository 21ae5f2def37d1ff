"""Hunyuan A13B (a JSON array) and Hy3 (names and key-value tags), both in `<tool_calls>`.

Open packs of Hy3 suffix every tag with `:opensource`; within an envelope that is constant.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import read_array
from osaurus.parsing.bodies.tag_pairs import PairTags, read_pairs
from osaurus.parsing.call_syntax import CallSyntax, Parameter, json_calls
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.source import Reader, Source
from osaurus.parsing.values import MAX_NAME


def _opener(suffix: str) -> Opener:
    tags = PairTags(suffix)
    closer = f"</tool_calls{suffix}>"

    def read(source: Source, calls: Calls) -> Reader[None]:
        if (yield from source.token()) == "[":
            yield from read_array(source, calls)
            found = yield from source.closer(closer)
        else:
            found = yield from source.expect(tags.call_open)
            while found == tags.call_open:
                raw, stop = yield from source.until(tags.name_end, at_most=MAX_NAME)
                name = calls.name(raw)
                if stop == tags.call_close:
                    calls.add(name, {})
                else:
                    yield from read_pairs(source, calls, tags, name)
                found = yield from source.closer(closer, tags.call_open)
        calls.is_closed = bool(found)

    return Opener(
        marker=f"<tool_calls{suffix}>",
        commit=regex.compile(rf"{GAP}(?:{regex.escape(tags.call_open)}|\[)"),
        read=read,
        closers=(closer,),
    )


def _pairs(suffix: str, needs: tuple[str, ...]) -> CallSyntax:
    tags = PairTags(suffix)
    return CallSyntax(
        begin=f"<tool_calls{suffix}>\n",
        open=tags.call_open,
        middle=f"{tags.separator}\n",
        close=f"{tags.call_close}\n",
        end=f"</tool_calls{suffix}>",
        arguments="tags",
        parameter=Parameter(
            open=tags.key_open,
            middle=f"</arg_key{suffix}>\n{tags.value_open}",
            close=f"</arg_value{suffix}>\n",
            stops=(f"</arg_value{suffix}>",),
            is_stripped=True,
        ),
        needs=needs,
    )


HUNYUAN = ToolFormat(
    name="hunyuan",
    openers=(_opener(""), _opener(":opensource")),
    orphans=("</tool_calls>", "</tool_calls:opensource>"),
    # A13B wraps what it says in these.
    wrappers=("<answer>", "</answer>"),
    writes=(
        _pairs(":opensource", ("<tool_sep:opensource>",)),
        _pairs("", ("<tool_sep>",)),
        json_calls("<tool_calls>[", "]</tool_calls>", between=", "),
    ),
)
