"""A chat completions body to a `ChatRequest`, or the 400 that names the field and its limit.

Unknown fields were dropped before; known ones that would change the output and are not served
are refused here by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from osaurus.errors import InvalidField
from osaurus.runtime.canonical import canonical_json
from osaurus.server.apis.openai_format import answer_format
from osaurus.server.apis.openai_sampling import num_choices, sampling_fields
from osaurus.server.apis.openai_thinking import thinking_budget, thinking_switches
from osaurus.server.apis.openai_wire import (
    ChatCompletionBody,
    MediaReference,
    WireMessage,
    WirePart,
    WireToolCall,
)
from osaurus.server.apis.shared_fields import offered_tools, sampling_number
from osaurus.types.chat import (
    ChatRequest,
    MediaPart,
    Message,
    Part,
    Role,
    TextPart,
    Tool,
    ToolCallRef,
)

_ROLES: tuple[str, ...] = get_args(Role)
#: Known fields that would change the output, and what to do instead.
_REFUSED = {
    "functions": "is not supported: it is the old form of tools, send those",
    "function_call": "is not supported: it is the old form of tool_choice, send that",
    "audio": "is not supported: this server writes text only",
    "web_search_options": "is not supported: offer a tool that searches",
    "chat_template": "is not supported: the model's own template is rendered",
}


def to_chat_request(body: ChatCompletionBody, request_id: str) -> ChatRequest:
    """Raises `InvalidField`, its `field` spelled as in the request."""
    _refuse_unsupported(body)
    if not body.messages:
        raise InvalidField("messages", "must hold at least one message")
    tools = offered_tools(body.tools or ())
    needs_call, forced_tool = _tool_choice(body.tool_choice, tools)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidField("continue_final_message", "excludes add_generation_prompt")
    return ChatRequest(
        model=body.model,
        messages=tuple(_message(i, message) for i, message in enumerate(body.messages)),
        tools=() if body.tool_choice == "none" else tools,
        sampling=_sampling(body),
        n=num_choices(body.n),
        template_kwargs=thinking_switches(body),
        thinking_budget=thinking_budget(body),
        needs_call=needs_call,
        forced_tool=forced_tool,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=answer_format(body),
        continue_final_message=bool(body.continue_final_message),
        add_generation_prompt=body.add_generation_prompt is not False,
        request_id=request_id,
    )


def _refuse_unsupported(body: ChatCompletionBody) -> None:
    for name, reason in _REFUSED.items():
        if getattr(body, name) is not None:
            raise InvalidField(name, reason)
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidField("modalities", 'must be ["text"]; this server writes text only')


def _tool_choice(choice: Any, tools: Sequence[Tool]) -> tuple[bool, str | None]:
    """Whether a call must be made, and to which tool alone."""
    if choice in (None, "auto", "none"):
        return False, None
    if choice == "required":
        if not tools:
            raise InvalidField("tool_choice", "'required' needs tools, and none are given")
        return True, None
    if isinstance(choice, str):
        raise InvalidField(
            "tool_choice", f"must be auto, none, required or a function, got {choice[:40]!r}"
        )
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidField("tool_choice", "must name its function, as {type, function: {name}}")
    if name not in {tool.name for tool in tools}:
        raise InvalidField("tool_choice", f"names {name[:64]!r}, which is not among the tools")
    return True, name


def _sampling(body: ChatCompletionBody) -> dict[str, Any]:
    sampling = sampling_fields(body)
    if body.max_tokens is None and body.max_completion_tokens is not None:
        sampling["max_tokens"] = sampling_number(
            "max_tokens", body.max_completion_tokens, "max_completion_tokens"
        )
    if body.logprobs:
        sampling["logprobs"] = True
    if body.top_logprobs is not None:
        top = sampling_number("top_logprobs", body.top_logprobs)
        if top and not body.logprobs:
            raise InvalidField("top_logprobs", "needs logprobs to be true")
        sampling["top_logprobs"] = top
    return sampling


def _message(index: int, message: WireMessage) -> Message:
    where = f"messages[{index}]"
    if message.role not in _ROLES:
        raise InvalidField(
            f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {message.role[:40]!r}"
        )
    role: Role = message.role  # pyright: ignore[reportAssignmentType] - checked above
    if message.content is None and role != "assistant":
        raise InvalidField(f"{where}.content", "is required")
    if role == "tool" and not message.tool_call_id:
        raise InvalidField(f"{where}.tool_call_id", "is required in a tool message")
    content: str | tuple[Part, ...]
    if isinstance(message.content, list):
        content = tuple(
            _part(f"{where}.content[{i}]", part) for i, part in enumerate(message.content)
        )
    else:
        content = message.content or ""
    thoughts = (message.reasoning_content, message.reasoning, message.thinking)
    reasoning = next((each for each in thoughts if isinstance(each, str)), None)
    is_answer = role == "assistant"
    return Message(
        role=role,
        content=content,
        reasoning_content=reasoning if is_answer else None,
        tool_calls=tuple(map(_past_call, message.tool_calls or ())) if is_answer else (),
        tool_call_id=message.tool_call_id if role == "tool" else None,
        name=message.name,
    )


def _part(where: str, part: WirePart) -> Part:
    match part.type:
        case "image_url" | "input_image":
            return MediaPart(kind="image", source=_source(where, part.image_url))
        case "input_audio":
            return MediaPart(kind="audio", source=_source(where, part.input_audio))
        case "video_url":
            return MediaPart(kind="video", source=_source(where, part.video_url))
        case _ if part.text is not None:
            return TextPart(text=part.text)
        case "text" | "input_text":
            raise InvalidField(f"{where}.text", "is required")
        case _:
            raise InvalidField(f"{where}.type", f"{part.type[:40]!r} is not supported")


def _source(where: str, reference: MediaReference | str | None) -> str:
    source = (
        reference
        if isinstance(reference, str)
        else (reference.url or reference.data if reference else "")
    )
    if not source:
        raise InvalidField(where, "has no media in it")
    return source


def _past_call(call: WireToolCall) -> ToolCallRef:
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = canonical_json(arguments)
    return ToolCallRef(call_id=call.id, name=call.function.name, arguments=arguments or "")
