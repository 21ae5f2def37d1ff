"""Fields that several protocols have in common, checked the same way for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from osaurus.errors import InvalidField
from osaurus.server.apis.openai_wire import WireTool
from osaurus.types.chat import Tool
from osaurus.types.sampling import INTEGER_FIELDS, check_number

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096

#: Any whole number a sampling field may hold; larger ones are somebody's mistake.
_LARGEST_INTEGER = 2**63


def sampling_number(name: str, value: Any, label: str | None = None) -> float:
    """A number for the field `name` of `SamplingParams`; `label` is its name on the wire."""
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        # Also keeps numbers too large for a float away from the arithmetic below.
        raise InvalidField(label or name, f"must be at most {_LARGEST_INTEGER} in size")
    check_number(name, value, label=label)
    return int(value) if name in INTEGER_FIELDS else float(value)


def stop_strings(stop: str | Sequence[str], label: str = "stop") -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidField(label, f"may hold at most {MAX_STOPS} strings, got {len(stops)}")
    for i, text in enumerate(stops):
        if len(text) > MAX_STOP_CHARACTERS:
            raise InvalidField(
                f"{label}[{i}]",
                f"may hold at most {MAX_STOP_CHARACTERS} characters, got {len(text)}",
            )
    return tuple(filter(None, stops))


def offered_tools(tools: Sequence[WireTool]) -> tuple[Tool, ...]:
    """The functions by name, the first of each name."""
    known: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        function = tool if tool.function is None else tool.function
        if tool.type != "function" or function.name is None:
            raise InvalidField(f"tools[{i}]", "must be a function with its name and parameters")
        if not function.name:
            field = "name" if tool.function is None else "function.name"
            raise InvalidField(f"tools[{i}].{field}", "must not be empty")
        known.setdefault(
            function.name,
            Tool(
                name=function.name,
                description=function.description or "",
                parameters=function.parameters or {},
                strict=bool(function.strict),
            ),
        )
    return tuple(known.values())
