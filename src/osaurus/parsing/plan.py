"""Which markers are legal where, worked out once for a format, an envelope and tools or none."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import regex

from osaurus.parsing.formats.base import BareOpener, Opener, ToolFormat
from osaurus.parsing.markers import MarkerSet
from osaurus.parsing.reasoning import ReasoningFormat

_NEVER = regex.compile("(?!)")


class Plan:
    """The machine's tables. Calls without a marker count only when tools are offered; in
    reasoning only explicit envelopes do, and without tools reasoning is left alone."""

    def __init__(
        self, tool_format: ToolFormat | None, reasoning: ReasoningFormat | None, has_tools: bool
    ) -> None:
        openers = tool_format.openers if tool_format else ()
        bare = tool_format.bare if tool_format else ()
        orphans = tool_format.orphans if tool_format else ()
        wrappers = tool_format.wrappers if tool_format else ()
        think_openers = reasoning.openers if reasoning else ()
        think_closers = reasoning.closers if reasoning else ()
        # A sentence is a marker only where a block can begin or is open.
        strays = () if reasoning is None or reasoning.only_first else think_openers + think_closers
        in_block = [one.marker for one in openers if one.in_reasoning and has_tools]

        self.openers: Mapping[str, Opener | BareOpener] = {
            **{one.marker: one for one in bare if one.marker},
            **{one.marker: one for one in openers},
        }
        self.orphans = frozenset(orphans)
        self.think_openers = frozenset(strays) & frozenset(think_openers)
        self.think_closers = MarkerSet(think_closers)
        self.reopeners = MarkerSet(self.think_openers)
        self.tool_marks = MarkerSet([*self.openers, *orphans, *wrappers])
        self.content = MarkerSet([*self.openers, *orphans, *wrappers, *strays])
        self.thinking = MarkerSet([*think_closers, *self.think_openers, *in_block])
        self.header = reasoning.header if reasoning and reasoning.header else _NEVER
        self.lead = _NEVER
        if reasoning is not None and reasoning.only_first:
            sentences = "|".join(map(regex.escape, think_openers))
            self.lead = regex.compile(rf"[ \t\r\n]{{0,64}}(?:{sentences})")

        self.bare_at: Mapping[str, BareOpener] = {
            char: one for one in reversed(bare) for char in one.starts if has_tools
        }
        self.bare_only_first = any(one.only_first for one in bare)
        starts = "".join(map(regex.escape, self.bare_at))
        indent = r"[ \t\r\n]*+" if self.bare_only_first else r"[ \t]*+"
        #: On a line that is blank so far, or a message; and on any line that follows.
        self.bare_here = regex.compile(f"{indent}([{starts}])") if starts else _NEVER
        self.bare_next = _NEVER
        if starts and not self.bare_only_first:
            self.bare_next = regex.compile(rf"\n{indent}([{starts}])")
        self._closers: dict[str, MarkerSet] = {}

    def closers_of(self, opener: Opener | BareOpener) -> MarkerSet:
        """What ends an envelope that broke."""
        if opener.marker not in self._closers:
            self._closers[opener.marker] = MarkerSet(opener.closers)
        return self._closers[opener.marker]


@lru_cache(maxsize=256)
def plan_for(
    tool_format: ToolFormat | None, reasoning: ReasoningFormat | None, *, has_tools: bool
) -> Plan:
    return Plan(tool_format, reasoning, has_tools)
