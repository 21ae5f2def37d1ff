"""A conversation as chat templates expect it: plain dictionaries, one per message.

Here alone it is decided what a template sees of a past tool call, of thinking that a client
left inside an answer, and of pictures. Fallbacks for templates that refuse a role or a form
belong here too, as further `views`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from osaurus.errors import InvalidField
from osaurus.types.chat import MediaPart, Message, Tool, ToolCallRef

ArgumentForm = Literal["parsed", "text", "wrapped"]

#: Put where a tool sent a picture that this model cannot look at.
_MEDIA_NOTE = "[{kind} left out: this model reads text only]"

#: Thinking markers that clients of servers without a reasoning rail leave in their history.
THINKING_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def views(
    messages: Sequence[Message], *, markers: Sequence[tuple[str, str]] = ()
) -> Iterator[list[dict[str, Any]]]:
    """The conversation in the forms a template may want, the usual one first.

    Templates differ in what they take for a call's arguments: an object, its JSON text, or an
    object even where the client's text is none. `markers` are the thinking markers that are
    tokens of this model. Raises `InvalidField` for media in anything but a tool's output.
    """
    forms: tuple[ArgumentForm, ...] = ("parsed",)
    if any(message.tool_calls for message in messages):
        forms = ("parsed", "text", "wrapped")
    for form in forms:
        yield [_view(index, message, form, markers) for index, message in enumerate(messages)]


def tool_views(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


def _view(
    index: int, message: Message, form: ArgumentForm, markers: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    content, reasoning = _content(index, message), message.reasoning_content
    if message.role == "assistant" and reasoning is None:
        reasoning, content = _separated(content, markers)
    view: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning is not None:
        view["reasoning_content"] = reasoning
    if message.tool_calls:
        view["tool_calls"] = [_call_view(call, form) for call in message.tool_calls]
    if message.tool_call_id is not None:
        view["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        view["name"] = message.name
    return view


def _content(index: int, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for part in message.content:
        if not isinstance(part, MediaPart):
            texts.append(part.text)
        elif message.role == "tool":
            texts.append(_MEDIA_NOTE.format(kind=part.kind))
        else:
            raise InvalidField(
                f"messages[{index}].content", f"this model reads text only, got {part.kind}"
            )
    return "".join(texts)


def _separated(content: str, markers: Sequence[tuple[str, str]]) -> tuple[str | None, str]:
    """Thinking and answer, as the model's output was before a client joined them.

    Left as it is when nothing closes: a mention of a marker is not thinking. A closer without
    opener counts, since many templates open the block in the prompt.
    """
    for opener, closer in markers:
        before, found, after = content.partition(closer)
        if not found:
            continue
        opened = before.lstrip()
        if opened.startswith(opener):
            return opened[len(opener) :].strip("\n"), after.lstrip("\n")
        if opener not in content:
            return before.strip("\n"), after.lstrip("\n")
    return None, content


def _call_view(call: ToolCallRef, form: ArgumentForm) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": _arguments(call.arguments, form)},
    }


def _arguments(text: str, form: ArgumentForm) -> Any:
    """An object where the text is one and the template may want it, else the raw text."""
    if form == "text":
        return text or "{}"
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return {"arguments": text} if form == "wrapped" else text
