"""The XML function body: Qwen3-Coder, Qwen3.5 and later, Qwen3-Next, MiMo V2, Seed-OSS.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

Models stamped with this format also write the JSON body of `json_tags`, and leave the wrapper
out; both are read.
"""

from __future__ import annotations

from dataclasses import replace

import regex

from osaurus.parsing.bodies.json_calls import JSON_START, read_enveloped
from osaurus.parsing.bodies.xml_calls import XmlSyntax, read_function, read_functions
from osaurus.parsing.call_syntax import xml_calls
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, BareOpener, Opener, ToolFormat
from osaurus.parsing.source import Reader, Source
from osaurus.parsing.values import MAX_NAME

_COMMIT = regex.compile(rf"{GAP}(?:<function=|{JSON_START})")
_BARE_COMMIT = regex.compile(rf"[^<>\r\n]{{1,{MAX_NAME}}}>{GAP}(?:<parameter=|</function>)")


def qwen_syntax(closer: str) -> XmlSyntax:
    return XmlSyntax(
        function=("<function=", "</function>"),
        parameter=("<parameter=", "</parameter>"),
        closers=(closer,),
    )


def xml_opener(opener: str, syntax: XmlSyntax) -> Opener:
    """A wrapper whose body is XML functions or JSON."""

    def read(source: Source, calls: Calls) -> Reader[None]:
        if (yield from source.token()) in "{[":
            yield from read_enveloped(source, calls, *syntax.closers)
        else:
            yield from read_functions(source, calls, syntax)

    return Opener(marker=opener, commit=_COMMIT, read=read, closers=syntax.closers)


def bare_function(syntax: XmlSyntax) -> BareOpener:
    """A function without its wrapper. The wrapper's closer, if it comes, is an orphan."""

    def read(source: Source, calls: Calls) -> Reader[None]:
        yield from read_function(source, calls, syntax, syntax.function_open)
        calls.is_closed = True

    return BareOpener(
        marker=syntax.function_open,
        commit=_BARE_COMMIT,
        read=read,
        closers=(syntax.function_close, syntax.parameter_close),
    )


_QWEN = qwen_syntax("</tool_call>")
QWEN_OPENER = xml_opener("<tool_call>", _QWEN)
QWEN_BARE = bare_function(_QWEN)
XML_ORPHANS = ("</tool_call>", "</function>", "</parameter>")

XML_FUNCTION = ToolFormat(
    name="xml_function",
    openers=(QWEN_OPENER, xml_opener("<seed:tool_call>", qwen_syntax("</seed:tool_call>"))),
    bare=(QWEN_BARE,),
    orphans=(*XML_ORPHANS, "</seed:tool_call>"),
    writes=(
        replace(xml_calls("<seed:tool_call>", "</seed:tool_call>"), needs=("<seed:tool_call>",)),
        xml_calls("<tool_call>", "</tool_call>"),
    ),
)
