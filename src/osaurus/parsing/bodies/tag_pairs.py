"""Calls written as a name and pairs of key and value tags: GLM and Hunyuan.

    NAME <arg_key>K</arg_key> <arg_value>V</arg_value> ... </tool_call>

Between tags, blanks and the two characters `\\n` are noise. A value ends at its closer only;
without the call's own closer more arguments could follow, so there is no call.
"""

from __future__ import annotations

from typing import Any

import regex

from osaurus.parsing.calls import Calls
from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.source import Reader, Source
from osaurus.parsing.values import MAX_NAME

_NOISE = regex.compile(r"(?:[ \t\r\n]|\\n)*+")


class PairTags:
    """The spelling of the tags; `suffix` stands before each `>` (Hunyuan's `:opensource`)."""

    def __init__(self, suffix: str = "") -> None:
        self.key_open = f"<arg_key{suffix}>"
        self.value_open = f"<arg_value{suffix}>"
        self.call_open = f"<tool_call{suffix}>"
        self.call_close = f"</tool_call{suffix}>"
        self.separator = f"<tool_sep{suffix}>"
        self.key_end = MarkerSet([f"</arg_key{suffix}>"])
        self.value_end = MarkerSet([f"</arg_value{suffix}>"])
        self.name_end = MarkerSet([self.separator, self.call_close])


def skip_noise(source: Source) -> Reader[None]:
    while True:
        found = _NOISE.match(source.text, source.pos, source.end)
        source.pos = found.end() if found else source.pos
        is_half = source.text[source.pos : source.end] == "\\"
        if source.ended or (source.pos < source.end and not is_half):
            return
        yield


def read_pairs(source: Source, calls: Calls, tags: PairTags, name: str) -> Reader[None]:
    """The arguments of `name` up to and with the call's closer."""
    arguments: dict[str, Any] = {}
    while True:
        yield from skip_noise(source)
        if (yield from source.expect(tags.key_open, tags.call_close)) == tags.call_close:
            calls.add(name, arguments)
            return
        key, _ = yield from source.until(tags.key_end, at_most=MAX_NAME)
        yield from skip_noise(source)
        yield from source.expect(tags.value_open)
        text, _ = yield from source.until(tags.value_end)
        key = key.strip()
        arguments[key] = calls.tools.from_text(name, key, text, "loose")
