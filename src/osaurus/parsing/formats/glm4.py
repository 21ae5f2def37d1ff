"""GLM 4.5 to 5, Laguna, Ling 3: a name and key-value tags; a JSON body is accepted.

<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import JSON_START, read_enveloped
from osaurus.parsing.bodies.tag_pairs import PairTags, read_pairs
from osaurus.parsing.call_syntax import CallSyntax, Parameter
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.source import Reader, Source
from osaurus.parsing.values import read_run

_TAGS = PairTags()
_CLOSER = _TAGS.call_close
_NAME = r"[A-Za-z0-9_.\-]"
_NAME_RUN = regex.compile(rf"{_NAME}*+")
_NOISE = r"(?:[ \t\r\n]|\\n){0,256}"
_COMMIT = regex.compile(rf"{GAP}(?:{_NAME}{{1,64}}{_NOISE}(?:<arg_key>|{_CLOSER})|{JSON_START})")


def _read(source: Source, calls: Calls) -> Reader[None]:
    if (yield from source.token()) in "{[":
        yield from read_enveloped(source, calls, _CLOSER)
        return
    name = calls.name((yield from read_run(source, _NAME_RUN, 64)))
    yield from read_pairs(source, calls, _TAGS, name)
    calls.is_closed = True


GLM4 = ToolFormat(
    name="glm4",
    openers=(Opener(marker="<tool_call>", commit=_COMMIT, read=_read, closers=(_CLOSER,)),),
    orphans=(_CLOSER,),
    writes=(
        CallSyntax(
            open=_TAGS.call_open,
            middle="\n",
            close=_CLOSER,
            between="\n",
            arguments="tags",
            parameter=Parameter(
                open=_TAGS.key_open,
                middle=f"</arg_key>\n{_TAGS.value_open}",
                close="</arg_value>\n",
                stops=("</arg_value>",),
                is_stripped=True,
            ),
            names=rf"{_NAME}{{1,64}}",
        ),
    ),
)
