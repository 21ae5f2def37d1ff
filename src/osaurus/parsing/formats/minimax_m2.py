"""MiniMax M2: `<invoke name="N">` elements in a `<minimax:tool_call>` wrapper.

M3 is another format (every tag prefixed, parameters named by their tag) and not this one.
"""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.xml_calls import XmlSyntax, read_functions
from osaurus.parsing.call_syntax import CallSyntax, Parameter
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.source import Reader, Source

_CLOSER = "</minimax:tool_call>"
_SYNTAX = XmlSyntax(
    function=("<invoke name=", "</invoke>"),
    parameter=("<parameter name=", "</parameter>"),
    closers=(_CLOSER,),
)


def _read(source: Source, calls: Calls) -> Reader[None]:
    return read_functions(source, calls, _SYNTAX)


MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    openers=(
        Opener(
            marker="<minimax:tool_call>",
            commit=regex.compile(rf"{GAP}<invoke name="),
            read=_read,
            closers=(_CLOSER,),
        ),
    ),
    orphans=(_CLOSER,),
    writes=(
        CallSyntax(
            begin="<minimax:tool_call>\n",
            open='<invoke name="',
            middle='">\n',
            close="</invoke>\n",
            end=_CLOSER,
            arguments="tags",
            parameter=Parameter(
                open='<parameter name="',
                middle='">',
                close="</parameter>\n",
                stops=("</parameter>", "<parameter name=", "</invoke>"),
            ),
        ),
    ),
)
