"""Putting a choice's machine together from the names that selection gave."""

from __future__ import annotations

from collections.abc import Sequence

from osaurus.parsing.formats import TOOL_FORMATS
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
) -> OutputMachine | None:
    """A fresh machine, or None when there is nothing to separate.

    `tool_format` and `reasoning` are names in `TOOL_FORMATS` and `REASONING_FORMATS`, or
    `harmony` for both. Raises `KeyError` for others: names come from `selection`.
    """
    if HARMONY in (tool_format, reasoning):
        return HarmonyMachine(tools=tools, start=start)
    if tool_format is None and reasoning is None:
        return None
    return Machine(
        tool_format=TOOL_FORMATS[tool_format] if tool_format is not None else None,
        reasoning=REASONING_FORMATS[reasoning] if reasoning is not None else None,
        tools=tools,
        start=start,
    )
