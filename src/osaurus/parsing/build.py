"""Putting a choice's machine together from the names that selection gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from osaurus.parsing.formats import TOOL_FORMATS
from osaurus.parsing.formats.base import ToolFormat
from osaurus.parsing.harmony import HarmonyMachine
from osaurus.parsing.machine import Machine
from osaurus.parsing.pieces import OutputMachine
from osaurus.parsing.reasoning import REASONING_FORMATS, Start
from osaurus.types.chat import Tool

HARMONY = "harmony"


def build_machine(
    tool_format: str | None,
    reasoning: str | None,
    *,
    tools: Sequence[Tool] = (),
    start: Start = Start.CONTENT,
    second_format: str | None = None,
) -> OutputMachine | None:
    """A fresh machine, or None when there is nothing to separate.

    `tool_format` and `reasoning` are names in `TOOL_FORMATS` and `REASONING_FORMATS`, or
    `harmony` for both. `second_format` is a further notation that the prompt shows the model,
    whose markers are taken too. Raises `KeyError` for others: names come from `selection`.
    """
    if HARMONY in (tool_format, reasoning):
        return HarmonyMachine(tools=tools, start=start)
    names = dict.fromkeys(name for name in (tool_format, second_format) if name is not None)
    if not names and reasoning is None:
        return None
    return Machine(
        tool_format=_joined(*names) if names else None,
        reasoning=REASONING_FORMATS[reasoning] if reasoning is not None else None,
        tools=tools,
        start=start,
    )


@cache
def _joined(name: str, second: str | None = None) -> ToolFormat:
    """A format with the openers of a second one; a marker of both is read as the first does."""
    found = TOOL_FORMATS[name]
    if second is None:
        return found
    other = TOOL_FORMATS[second]
    known = {opener.marker for opener in found.openers}
    return replace(
        found,
        openers=(*found.openers, *(each for each in other.openers if each.marker not in known)),
        orphans=tuple(dict.fromkeys((*found.orphans, *other.orphans))),
    )
