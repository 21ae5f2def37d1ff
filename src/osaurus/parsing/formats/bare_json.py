"""A JSON call object, or an array of them, without any marker: a policy, not a grammar."""

from __future__ import annotations

import regex

from osaurus.parsing.bodies.json_calls import read_bare
from osaurus.parsing.formats.base import BareOpener, ToolFormat

#: The keys of a call object; any other key makes it an answer.
_KEY = r'"(?:name|arguments|parameters|id|type)"'
COMMIT = regex.compile(rf"(?:\[[ \t\r\n]{{0,64}})?\{{[ \t\r\n]{{0,64}}{_KEY}")

BARE_JSON = ToolFormat(
    name="bare_json", bare=(BareOpener(starts="{[", commit=COMMIT, read=read_bare),)
)
