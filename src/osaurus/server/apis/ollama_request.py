"""Ollama's chat and generate bodies to a `ChatRequest`, or the 400 that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from osaurus.chat.turns import call_id
from osaurus.errors import InvalidField
from osaurus.runtime.canonical import canonical_json
from osaurus.server.apis.ollama_options import sampling_of, thinking_of
from osaurus.server.apis.ollama_wire import (
    AnswerBody,
    ChatBody,
    GenerateBody,
    OllamaMessage,
    PastCall,
)
from osaurus.server.apis.shared_fields import offered_tools, sampling_number
from osaurus.types.chat import (
    ChatRequest,
    MediaPart,
    Message,
    Part,
    RawPrompt,
    Role,
    TextPart,
    ToolCallRef,
)
from osaurus.types.response_format import response_format_of

_ROLES: tuple[str, ...] = get_args(Role)


def chat_request_of(body: ChatBody, request_id: str) -> ChatRequest:
    """An answer goes on where a last message of the assistant ends, as under Ollama. Raises
    `InvalidField`, its `field` spelled as in the request."""
    messages = _messages(body.messages or ())
    last = messages[-1] if messages else None
    return ChatRequest(
        messages=messages,
        tools=offered_tools(body.tools or ()),
        continue_final_message=last is not None
        and last.role == "assistant"
        and bool(last.text)
        and not last.tool_calls,
        **_shared(body, request_id),
    )


def generate_request_of(body: GenerateBody, request_id: str) -> ChatRequest:
    """`prompt` as a user's message, behind `system` where that is given; as it stands with `raw`,
    and with `suffix` as what the answer shall join to that."""
    _refuse_images("images", body.images)
    if body.raw or body.suffix:
        prompt = RawPrompt(content=body.prompt or "", suffix=body.suffix or None)
        return ChatRequest(prompt=prompt, **_shared(body, request_id))
    messages = [Message(role="user", content=body.prompt or "")]
    if body.system:
        messages.insert(0, Message(role="system", content=body.system))
    return ChatRequest(messages=tuple(messages), **_shared(body, request_id))


def untemplated(request: ChatRequest) -> ChatRequest | None:
    """The same without a template; None for a conversation, which has no other form."""
    *system, last = request.messages or (Message(role="assistant"),)
    if last.role != "user" or any(message.role != "system" for message in system):
        return None
    text = "\n\n".join(message.text for message in request.messages)
    return replace(request, messages=(), prompt=RawPrompt(content=text), template_kwargs={})


def answer_sampling(body: AnswerBody) -> dict[str, Any]:
    sampling = sampling_of(body.options or {})
    top = body.top_logprobs
    if top is not None:
        top = sampling_number("top_logprobs", top)
    if body.logprobs:
        sampling["logprobs"] = True
        sampling["top_logprobs"] = top or 0
    return sampling


def _shared(body: AnswerBody, request_id: str) -> dict[str, Any]:
    return {
        "model": body.model,
        "sampling": answer_sampling(body),
        "template_kwargs": thinking_of(body.think),
        "response_format": response_format_of(body.format, "format", takes_schema=True),
        "request_id": request_id,
    }


def _messages(messages: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    """A result without an id answers the first open call to the tool that it names."""
    found: list[Message] = []
    waiting: list[ToolCallRef] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        calls = tuple(map(_past_call, message.tool_calls or ()))
        if message.role == "assistant" and calls:
            calls = tuple(
                ToolCallRef(call_id=call_id(call, i), name=call.name, arguments=call.arguments)
                for i, call in enumerate(calls)
            )
            waiting = list(calls)
        found.append(_message(where, message, calls, _answered_id(message, waiting)))
    return tuple(found)


def _answered_id(message: OllamaMessage, waiting: list[ToolCallRef]) -> str | None:
    """Takes the call that a tool's message answers out of `waiting`."""
    name = message.tool_name or message.name
    for call in waiting if message.role == "tool" else ():
        if message.tool_call_id == call.call_id or (not message.tool_call_id and name == call.name):
            waiting.remove(call)
            return call.call_id
    return message.tool_call_id


def _message(
    where: str, message: OllamaMessage, calls: tuple[ToolCallRef, ...], answers: str | None
) -> Message:
    if message.role not in _ROLES:
        raise InvalidField(
            f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {message.role[:40]!r}"
        )
    role: Role = message.role  # pyright: ignore[reportAssignmentType] - checked above
    content: str | tuple[Part, ...] = message.content or ""
    if role == "tool" and message.images:
        pictures = (MediaPart(kind="image", source=image) for image in message.images)
        content = (TextPart(text=message.content or ""), *pictures)
    else:
        _refuse_images(f"{where}.images", message.images)
    is_answer = role == "assistant"
    return Message(
        role=role,
        content=content,
        reasoning_content=message.thinking if is_answer else None,
        tool_calls=calls if is_answer else (),
        tool_call_id=answers if role == "tool" else None,
        name=(message.tool_name or message.name) if role == "tool" else None,
    )


def _past_call(call: PastCall) -> ToolCallRef:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        arguments = canonical_json(arguments or {})
    return ToolCallRef(call_id=call.id, name=call.function.name, arguments=arguments)


def _refuse_images(where: str, images: Sequence[str] | None) -> None:
    if images:
        raise InvalidField(where, "the models of this server read text only; leave pictures out")
