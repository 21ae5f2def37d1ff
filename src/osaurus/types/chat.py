"""A conversation as every protocol hands it to `chat/`: messages, tools, the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from osaurus.types.response_format import ResponseFormat
from osaurus.types.sampling import SamplingParams

Role = Literal["system", "developer", "user", "assistant", "tool"]
#: Whose messages tell the model what to do; few templates know the second of them.
SYSTEM_ROLES: frozenset[str] = frozenset({"system", "developer"})
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """A picture, sound, video or file as it came: a data URL or an address, never fetched here."""

    kind: Literal["image", "audio", "video", "document"]
    source: str


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRef:
    """A call in the history. `arguments` is JSON text as the client sent it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str | tuple[Part, ...] = ""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallRef, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """All text parts joined without separators."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """Text or token ids to go on from, as they are: special tokens are honoured, no template is
    rendered and nothing in the answer is parsed. With `suffix` the answer is what stands between
    both, for models that fill in the middle."""

    content: str | tuple[int, ...]
    suffix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One chat call, whatever protocol it came by.

    `template_kwargs` are the caller's explicit template switches (`enable_thinking`, …);
    nothing adds to them silently. `thinking_budget` bounds the tokens spent inside thinking
    blocks; None is no bound. `sampling` holds only what the caller set, by field name
    of `SamplingParams`; model and engine defaults fill the rest in `chat/`.

    `needs_call`: an answer without a call to an offered tool is an error; `forced_tool` names
    the only one that counts. With `continue_final_message` the answer goes on where the last
    message, an assistant's, ends.

    A `prompt` stands in for messages, tools and template.

    `response_format` is the shape that the visible answer must have, None for free text; every
    protocol makes it with the functions of `types/response_format.py`.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompt: RawPrompt | None = None
    tools: tuple[Tool, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    needs_call: bool = False
    forced_tool: str | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    source: Literal["http_api", "cli", "chat_ui", "plugin", "proof"] = "http_api"
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


__all__ = [
    "SYSTEM_ROLES",
    "ChatRequest",
    "FinishReason",
    "MediaPart",
    "Message",
    "Part",
    "RawPrompt",
    "ResponseFormat",
    "Role",
    "SamplingParams",
    "TextPart",
    "Tool",
    "ToolCallRef",
    "Usage",
]
