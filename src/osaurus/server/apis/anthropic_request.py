"""An Anthropic Messages body to a `ChatRequest`, or the 400 that names the field.

Counting tokens goes the same way, so that a count is that of the request itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osaurus.chat.profiles import EFFORT, SWITCH
from osaurus.errors import InvalidField
from osaurus.server.apis.anthropic_blocks import PlacedMessage, system_content, turns_of
from osaurus.server.apis.anthropic_wire import MessagesBody, WireTool
from osaurus.server.apis.shared_fields import sampling_number, stop_strings
from osaurus.types.chat import ChatRequest, Message, Tool
from osaurus.types.response_format import ResponseFormat, response_format_of, the_one_format

#: `adaptive` leaves it to the model how much it thinks, not whether it may.
_THINKING: Mapping[str, bool] = {
    "enabled": True,
    "adaptive": True,
    "between_tools": True,
    "disabled": False,
}
_DISPLAYS = ("summarized", "omitted")
_CHOICES = ("auto", "any", "tool", "none")

#: The date that names a version of this API, behind a vendor's name where another cloud sells it.
_VERSION = re.compile(r"(?:[a-z][a-z0-9]{0,31}-)?\d{4}-\d{2}-\d{2}")
_PLACE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """`places` are where each message of `chat` comes from; `notes` say what was left out."""

    chat: ChatRequest
    places: tuple[str, ...]
    notes: tuple[str, ...] = ()
    shows_thinking: bool = True

    def renamed(self, error: InvalidField) -> InvalidField:
        """A fault that was found behind this room, by its field in the request."""
        message = error.message.removeprefix(f"{error.field}: ")
        if match := _PLACE.fullmatch(error.field):
            rest = match[2].replace("tool_call_id", "tool_use_id")
            return InvalidField(self.places[int(match[1])] + rest, message)
        field = {EFFORT: "output_config.effort", SWITCH: "thinking"}.get(error.field, error.field)
        return InvalidField(field, message)


def check_version(version: str | None) -> None:
    """Any version is served, and none need be named. Raises `InvalidField` for what is none."""
    if version is not None and not _VERSION.fullmatch(version.strip()):
        raise InvalidField(
            "anthropic-version", f"must be a date such as 2023-06-01, got {version[:40]!r}"
        )


def to_chat_request(
    body: MessagesBody, request_id: str, *, is_count: bool = False
) -> MessagesRequest:
    """Raises `InvalidField`, its `field` spelled as in the request. A count needs no
    `max_tokens`."""
    if not body.messages:
        raise InvalidField("messages", "must hold at least one message")
    if body.max_tokens is None and not is_count:
        raise InvalidField("max_tokens", "is required")
    turns = turns_of(body.messages)
    notes = turns.notes
    placed, is_continued = _end_of(turns.messages)
    if body.system:
        system = Message(role="system", content=system_content(body.system))
        placed = [PlacedMessage(message=system, place="system"), *placed]
    tools = _tools(body.tools or (), notes)
    if body.mcp_servers:
        notes.append("mcp_servers are left out: no tool of theirs can be called")
    needs_call, forced_tool = _tool_choice(body, tools)
    choice = body.tool_choice
    return MessagesRequest(
        chat=ChatRequest(
            model=body.model,
            messages=tuple(each.message for each in placed),
            tools=() if choice is not None and choice.type == "none" else tools,
            sampling=_sampling(body),
            template_kwargs=_switches(body),
            thinking_budget=_tokens("thinking_budget", body.thinking_budget),
            needs_call=needs_call,
            forced_tool=forced_tool,
            parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
            response_format=_format(body),
            continue_final_message=is_continued,
            request_id=request_id,
        ),
        places=tuple(each.place for each in placed),
        notes=tuple(notes),
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
    )


def _end_of(placed: list[PlacedMessage]) -> tuple[list[PlacedMessage], bool]:
    """The conversation, and whether the answer goes on with its last message."""
    last = placed[-1]
    if last.message.role != "assistant":
        return placed, False
    if last.message.tool_calls:
        raise InvalidField(
            last.place, "ends with tool_use; the tool_result must follow in a user message"
        )
    if last.message.text or last.message.reasoning_content:
        return placed, True
    if len(placed) == 1:
        raise InvalidField(f"{last.place}.content", "must not be empty")
    return placed[:-1], False


def _tools(tools: Sequence[WireTool], notes: list[str]) -> tuple[Tool, ...]:
    """The functions by name, the first of each name; tools of other types are left out, and
    the functions beside them stay callable."""
    known: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            notes.append(f"tools[{i}] is left out: {tool.type[:60]} is not served here")
            continue
        if not tool.name:
            raise InvalidField(f"tools[{i}].name", "is required")
        if tool.input_schema is None:
            raise InvalidField(f"tools[{i}].input_schema", "is required")
        known.setdefault(
            tool.name,
            Tool(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.input_schema,
                strict=bool(tool.strict),
            ),
        )
    return tuple(known.values())


def _tool_choice(body: MessagesBody, tools: Sequence[Tool]) -> tuple[bool, str | None]:
    """Whether a call must be made, and to which tool alone."""
    choice = body.tool_choice
    if choice is None:
        return False, None
    if choice.type not in _CHOICES:
        raise InvalidField(
            "tool_choice.type", f"must be one of {', '.join(_CHOICES)}, got {choice.type[:40]!r}"
        )
    if choice.type in ("auto", "none"):
        return False, None
    if not tools:
        raise InvalidField(
            "tool_choice", f"{choice.type!r} needs a tool with an input_schema, and none is given"
        )
    if choice.type == "any":
        return True, None
    if not choice.name:
        raise InvalidField("tool_choice.name", "is required")
    if choice.name not in {tool.name for tool in tools}:
        raise InvalidField(
            "tool_choice", f"names {choice.name[:64]!r}, which is not among the tools served here"
        )
    return True, choice.name


def _sampling(body: MessagesBody) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        name: sampling_number(name, value)
        for name in ("max_tokens", "temperature", "top_p", "top_k")
        if (value := getattr(body, name)) is not None
    }
    if body.stop_sequences is not None:
        sampling["stop"] = stop_strings(body.stop_sequences, "stop_sequences")
    return sampling


def _switches(body: MessagesBody) -> dict[str, Any]:
    """The request's own template switches: whether to think, and how hard."""
    switches: dict[str, Any] = {}
    thinking = body.thinking
    if thinking is not None:
        if thinking.type not in _THINKING:
            raise InvalidField(
                "thinking.type",
                f"must be one of {', '.join(_THINKING)}, got {thinking.type[:40]!r}",
            )
        if thinking.display is not None and thinking.display not in _DISPLAYS:
            raise InvalidField(
                "thinking.display",
                f"must be one of {', '.join(_DISPLAYS)}, got {thinking.display[:40]!r}",
            )
        # A goal for the model, which no template has a place for; `thinking_budget` is a bound.
        _tokens("thinking.budget_tokens", thinking.budget_tokens)
        switches[SWITCH] = _THINKING[thinking.type]
    config = body.output_config
    effort = body.effort if config is None or config.effort is None else config.effort
    if effort is not None:
        switches[EFFORT] = effort
    return switches


def _tokens(label: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidField(label, f"must be a whole number, got {type(value).__name__}")
    if value < 0:
        raise InvalidField(label, f"must be at least 0 tokens, got {value}")
    return value


def _format(body: MessagesBody) -> ResponseFormat | None:
    config = body.output_config
    return the_one_format(
        response_format_of(None if config is None else config.format, "output_config.format"),
        response_format_of(body.output_format, "output_format"),
    )
