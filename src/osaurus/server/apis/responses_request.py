"""A responses body to a `ChatRequest` and the response object that it begins, or the 400 that
names the field.

Unknown fields were dropped before; known ones that would change the output and are not served
are refused here by name. Tools and history items of types that are not served are left out and
a note says so: the functions beside them stay callable, the thread stays usable.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from osaurus.errors import InvalidField
from osaurus.server.apis.openai_thinking import thinking_budget, thinking_switches
from osaurus.server.apis.openai_wire import WireTool
from osaurus.server.apis.responses_history import Conversation
from osaurus.server.apis.responses_items import whole_items
from osaurus.server.apis.responses_store import ResponseStore
from osaurus.server.apis.responses_wire import (
    Item,
    ResponseObject,
    ResponsesBody,
    TextOptions,
    new_id,
)
from osaurus.server.apis.shared_fields import offered_tools, sampling_number, stop_strings
from osaurus.types.chat import ChatRequest, Tool
from osaurus.types.response_format import JsonSchemaFormat, response_format_of
from osaurus.types.sampling import SamplingParams

_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "seed",
    "min_tokens",
)
_LOGPROBS = "message.output_text.logprobs"
_VERBOSITIES = ("low", "medium", "high")

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResponse:
    """`response` is what the client sees before anything ran. `before` are the items of the
    responses that this one goes on from, `own` those of its input."""

    chat_request: ChatRequest
    response: ResponseObject
    before: tuple[Item, ...]
    own: tuple[Item, ...]
    notes: tuple[str, ...]
    conversation: Conversation


def prepare_response(
    body: ResponsesBody, store: ResponseStore, request_id: str
) -> PreparedResponse:
    """Raises `InvalidField`, its `field` spelled as in the request, `PreviousResponseNotFound`."""
    _refuse_unsupported(body)
    before: tuple[Item, ...] = ()
    if body.previous_response_id is not None:
        before = store.items_up_to(body.previous_response_id)
    own = whole_items(body.input if body.input is not None else (), store.finder())
    conversation = conversation_of(body.instructions, before, own, body.input)
    tools, notes = _tools(body.tools or ())
    choice = _tool_choice(body.tool_choice, tools)
    request = ChatRequest(
        model=body.model,
        messages=tuple(conversation.messages),
        tools=choice.tools,
        sampling=_sampling(body),
        template_kwargs=thinking_switches(body),
        thinking_budget=thinking_budget(body),
        needs_call=choice.needs_call,
        forced_tool=choice.forced_tool,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=response_format_of(body.text and body.text.format, "text.format"),
        request_id=request_id,
    )
    return PreparedResponse(
        chat_request=request,
        response=_response(body, request, tools),
        before=before,
        own=tuple(own),
        notes=(*notes, *conversation.notes),
        conversation=conversation,
    )


def conversation_of(
    instructions: str | None,
    before: Sequence[Item],
    own: Sequence[Item],
    given: str | Sequence[Item] | None,
) -> Conversation:
    """`given` is the input as it was sent. Instructions are those of this request alone: what
    an earlier response was told is not part of its items."""
    conversation = Conversation()
    if instructions:
        conversation.add_instructions(instructions)
    conversation.add(before, "previous_response_id")
    conversation.add(own, "input" if isinstance(given, str) else "input[{}]")
    if not conversation.messages:
        raise InvalidField("input", "must hold at least one item")
    return conversation


def _refuse_unsupported(body: ResponsesBody) -> None:
    if body.prompt is not None:
        raise InvalidField("prompt", "stored prompts are not served; send instructions and input")
    if body.conversation is not None:
        raise InvalidField(
            "conversation", "is not served; go on from a response by previous_response_id"
        )
    if body.truncation not in (None, "disabled"):
        raise InvalidField(
            "truncation",
            f"must be disabled, got {body.truncation[:40]!r}: nothing is dropped from a "
            "conversation here; shorten the input instead",
        )
    if body.background and body.store is False:
        raise InvalidField("background", "needs store to be true: the answer is read from there")
    if body.background and body.stream:
        raise InvalidField("background", "excludes stream; read the response by its id instead")
    if body.text is not None and body.text.verbosity not in (None, *_VERBOSITIES):
        raise InvalidField("text.verbosity", f"must be one of {', '.join(_VERBOSITIES)}")
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidField(
            "metadata", f"may hold at most {MAX_METADATA} pairs, got {len(metadata)}"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidField(
                f"metadata.{key[:MAX_METADATA_KEY]}",
                f"keys may hold {MAX_METADATA_KEY} characters and values {MAX_METADATA_VALUE}",
            )


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[tuple[Tool, ...], list[str]]:
    wires: list[WireTool] = []
    others: dict[str, None] = {}
    for i, tool in enumerate(given):
        if tool.get("type") != "function":
            others[str(tool.get("type"))[:40]] = None
            continue
        try:
            wire = msgspec.convert(tool, WireTool)
        except msgspec.ValidationError as error:
            raise InvalidField(f"tools[{i}]", f"is no function tool: {error}") from None
        if not (wire if wire.function is None else wire.function).name:
            raise InvalidField(f"tools[{i}].name", "is required")
        wires.append(wire)
    notes = [
        f"tools of type {kind!r} are not served: left out, the functions stay callable"
        for kind in others
    ]
    return offered_tools(wires), notes


@dataclass(frozen=True, slots=True)
class _Choice:
    """`tools` are those that the model is offered."""

    tools: tuple[Tool, ...]
    needs_call: bool = False
    forced_tool: str | None = None


def _tool_choice(choice: str | Mapping[str, Any] | None, tools: tuple[Tool, ...]) -> _Choice:
    match choice:
        case None | "auto":
            return _Choice(tools)
        case "none":
            return _Choice(())
        case "required":
            if not tools:
                raise InvalidField("tool_choice", "'required' needs functions, and none are given")
            return _Choice(tools, needs_call=True)
        case str():
            raise InvalidField(
                "tool_choice", f"must be auto, none, required or an object, got {choice[:40]!r}"
            )
        case {"type": "function"}:
            inner = choice.get("function")
            name = (inner if isinstance(inner, dict) else choice).get("name")
            if not isinstance(name, str):
                raise InvalidField("tool_choice.name", "is required, as a string")
            if name not in {tool.name for tool in tools}:
                raise InvalidField("tool_choice", f"names {name[:64]!r}, which is not among tools")
            return _Choice(tools, needs_call=True, forced_tool=name)
        case {"type": "allowed_tools"}:
            return _allowed(choice, tools)
        case _:
            kind = str(choice.get("type"))[:40]
            raise InvalidField(
                "tool_choice.type", f"must be function or allowed_tools, got {kind!r}"
            )


def _allowed(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> _Choice:
    """Others than the allowed are not offered at all, so that nothing need keep the model from
    them. Allowed tools of types that are not served were left out with those tools."""
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required", "none"):
        raise InvalidField("tool_choice.mode", f"must be auto or required, got {str(mode)[:40]!r}")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise InvalidField("tool_choice.tools", "must be an array of tools")
    names = [one.get("name") for one in listed if one.get("type") == "function"]
    known = [tool.name for tool in tools]  # a name of the client's may be any JSON
    for name in names:
        if name not in known:
            raise InvalidField(
                "tool_choice.tools", f"names {str(name)[:64]!r}, which is not among tools"
            )
    allowed = tuple(tool for tool in tools if tool.name in names)
    if mode == "required" and not allowed:
        raise InvalidField("tool_choice.tools", "must allow a function when a call is required")
    return _Choice(() if mode == "none" else allowed, needs_call=mode == "required")


def _sampling(body: ResponsesBody) -> dict[str, Any]:
    """Only what the client set, by field name of `SamplingParams`."""
    sampling: dict[str, Any] = {}
    for name in _NUMBERS:
        value = getattr(body, name)
        if value is not None:
            sampling[name] = sampling_number(name, value)
    if body.max_output_tokens is not None:
        sampling["max_tokens"] = sampling_number(
            "max_tokens", body.max_output_tokens, "max_output_tokens"
        )
    if body.stop is not None:
        sampling["stop"] = stop_strings(body.stop)
    if sampling.get("top_logprobs") or _LOGPROBS in (body.include or ()):
        sampling["logprobs"] = True
    return sampling


def _response(body: ResponsesBody, request: ChatRequest, tools: Sequence[Tool]) -> ResponseObject:
    engine = SamplingParams()  # what runs is filled in once the model's own values are known
    return ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=body.model,
        status="queued" if body.background else "in_progress",
        previous_response_id=body.previous_response_id,
        instructions=body.instructions,
        tools=[_shown_tool(tool) for tool in tools],
        tool_choice=_shown_choice(body.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        text=_shown_text(body.text, request),
        reasoning=_shown_reasoning(body),
        temperature=request.sampling.get("temperature", engine.temperature),
        top_p=request.sampling.get("top_p", engine.top_p),
        presence_penalty=request.sampling.get("presence_penalty", engine.presence_penalty),
        frequency_penalty=request.sampling.get("frequency_penalty", engine.frequency_penalty),
        top_logprobs=request.sampling.get("top_logprobs", 0),
        max_output_tokens=request.sampling.get("max_tokens"),
        max_tool_calls=body.max_tool_calls,
        store=body.store is not False,
        background=bool(body.background),
        metadata=body.metadata or {},
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        user=body.user,
    )


def _shown_tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }


def _shown_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    if not isinstance(choice, dict):
        return choice or "auto"
    inner = choice.get("function")
    if isinstance(inner, dict):  # as chat completions spell it
        return {"type": "function", "name": inner.get("name")}
    return {"mode": "auto", **choice} if choice.get("type") == "allowed_tools" else choice


def _shown_text(text: TextOptions | None, request: ChatRequest) -> dict[str, Any]:
    shown: dict[str, Any] = {"format": (text and text.format) or {"type": "text"}}
    wanted = request.response_format
    if isinstance(wanted, JsonSchemaFormat):
        given = shown["format"].get("json_schema", shown["format"])
        shown["format"] = {
            "type": "json_schema",
            "name": wanted.name or "answer",
            "description": given.get("description"),
            "schema": wanted.schema,
            "strict": wanted.strict,
        }
    if text is not None and text.verbosity is not None:
        shown["verbosity"] = text.verbosity
    return shown


def _shown_reasoning(body: ResponsesBody) -> dict[str, Any] | None:
    if not isinstance(body.reasoning, dict):
        return None
    return {"effort": body.reasoning.get("effort"), "summary": body.reasoning.get("summary")}
