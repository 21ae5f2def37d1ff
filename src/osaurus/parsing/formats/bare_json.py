"""A JSON call object, or an array of them, without any marker: a policy, not a grammar."""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import read_bare
from osaurus.parsing.call_syntax import json_calls
from osaurus.parsing.formats.base import BareOpener, ToolFormat

_BLANKS = r"[ \t\r\n]{0,64}"
#: The first member of a call object; any other key makes it an answer.
_MEMBER = (
    rf'(?:"name"{_BLANKS}:{_BLANKS}"'
    rf'|"(?:arguments|parameters)"{_BLANKS}:{_BLANKS}[{{"n]'
    rf'|"(?:id|type)"{_BLANKS}:)'
)
COMMIT = regex.compile(rf"(?:\[{_BLANKS})?\{{{_BLANKS}{_MEMBER}")

BARE_JSON = ToolFormat(
    name="bare_json",
    bare=(BareOpener(starts="{[", commit=COMMIT, read=read_bare),),
    writes=(json_calls(between="\n"),),
)
