"""Anthropic Messages on the wire: request, message and stream events, field by field.

Shapes only. A content block is one struct for every type: which fields a type needs is checked
in `anthropic_blocks.py`, whose messages name the block. Numbers are untyped here, as in
`openai_wire.py`. What is not listed (`cache_control`, `metadata`, ...) is ignored wherever it
stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType


class WireBlock(Struct, kw_only=True):
    type: str
    text: str | None = None
    thinking: str | None = None
    source: dict[str, Any] | str | None = None
    title: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: Any = None
    is_error: bool | None = None


class WireMessage(Struct, kw_only=True):
    role: str
    content: str | list[WireBlock]


class WireTool(Struct, kw_only=True):
    """`type` is absent or `custom` for a function; any other names a tool of Anthropic's."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class WireToolChoice(Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class WireThinking(Struct, kw_only=True):
    type: str
    budget_tokens: Any = None
    display: str | None = None


class WireOutputConfig(Struct, kw_only=True):
    effort: str | None = None
    format: Any = None


class MessagesBody(Struct, kw_only=True):
    model: str
    messages: list[WireMessage]
    system: str | list[WireBlock] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[WireTool] | None = None
    tool_choice: WireToolChoice | None = None
    thinking: WireThinking | None = None
    output_config: WireOutputConfig | None = None
    output_format: Any = None
    effort: str | None = None
    mcp_servers: list[Any] | None = None
    max_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    # Not of this API: the bound on thinking that is enforced, as on the other routes.
    thinking_budget: Any = None


class OutputTokensDetails(Struct, kw_only=True):
    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """The three input counts add up to the whole prompt."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """`input` is the call's JSON as it is; an empty object where a stream starts the block."""

    id: str
    name: str
    input: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnswerMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    model: str
    usage: MessageUsage
    content: list[AnswerBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"
    osaurus: Mapping[str, Any] | UnsetType = UNSET


class TextDelta(Struct, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class StopDelta(Struct, kw_only=True):
    stop_reason: str
    stop_sequence: str | None = None


class MessageStart(Struct, kw_only=True, tag_field="type", tag="message_start"):
    message: AnswerMessage


class Ping(Struct, kw_only=True, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class ContentBlockDelta(Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(Struct, kw_only=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    osaurus: Mapping[str, Any] | UnsetType = UNSET


class MessageStop(Struct, kw_only=True, tag_field="type", tag="message_stop"):
    pass


StreamEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)


class TokenCount(Struct, kw_only=True):
    input_tokens: int


encode = msgspec.json.Encoder(order="sorted").encode


def event_name(event: StreamEvent) -> str:
    """The event's `type`, which is its name in the stream too."""
    return str(event.__struct_config__.tag)
