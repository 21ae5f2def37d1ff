"""ZAYA: the XML function body in its own wrapper, with two habits of small checkpoints.

Names may be elements (`<parameter><name>K</name><value>V</value></parameter>`), and a string
may be written with `<br>` for line breaks or between JSON quotes.
"""

from __future__ import annotations

from typing import Any

import regex

from osaurus.parsing.arguments import admitted_types
from osaurus.parsing.bodies.json_calls import JSON_START, read_enveloped
from osaurus.parsing.bodies.xml_calls import XmlSyntax, read_functions, schema_text
from osaurus.parsing.call_syntax import xml_calls
from osaurus.parsing.calls import Calls
from osaurus.parsing.formats.base import GAP, Opener, ToolFormat
from osaurus.parsing.formats.xml_function import bare_function
from osaurus.parsing.source import Malformed, Reader, Source
from osaurus.parsing.values import parse_json

_CLOSER = "</zyphra_tool_call>"
_BREAK = regex.compile(r"<br ?/?>")
_COMMIT = regex.compile(rf"{GAP}(?:<function[=>]|{JSON_START})")


def _value(calls: Calls, name: str, key: str, text: str) -> Any:
    value = schema_text(calls, name, key, text)
    tools = calls.tools
    types = admitted_types(tools.declared(name).get(key), tools.schema(name))
    if not isinstance(value, str) or "string" not in types or types - {"null", "string"}:
        return value
    value = _BREAK.sub("\n", value)
    if len(value) > 1 and value[0] == value[-1] == '"':
        try:
            return parse_json(value)
        except Malformed:
            return value
    return value


_SYNTAX = XmlSyntax(
    function=("<function=", "</function>"),
    parameter=("<parameter=", "</parameter>"),
    closers=(_CLOSER,),
    value=_value,
    has_elements=True,
)


def _read(source: Source, calls: Calls) -> Reader[None]:
    if (yield from source.token()) in "{[":
        yield from read_enveloped(source, calls, _CLOSER)
    else:
        yield from read_functions(source, calls, _SYNTAX)


ZAYA_XML = ToolFormat(
    name="zaya_xml",
    openers=(Opener(marker="<zyphra_tool_call>", commit=_COMMIT, read=_read, closers=(_CLOSER,)),),
    bare=(bare_function(_SYNTAX),),
    orphans=(_CLOSER, "</function>", "</parameter>"),
    writes=(xml_calls("<zyphra_tool_call>", _CLOSER),),
)
