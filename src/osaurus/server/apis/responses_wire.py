"""Open Responses on the wire: the request's body, the response object, the stream's events.

Shapes only. Items are plain objects: they come from clients in many forms, are kept as history
and go out again as they are. What a field may hold is checked in `responses_request.py`.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

#: One entry of a conversation: a message, a call, a call's result, a piece of thinking.
Item = dict[str, Any]


class TextOptions(Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Struct, kw_only=True):
    model: str
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: str | None = None
    # How much to think; the others are what other servers' clients call it.
    reasoning: Any = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Any = None
    think: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None
    # Numbers: their type and range are checked together.
    max_output_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    # Beyond the published document.
    stop: str | list[str] | None = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    seed: Any = None
    min_tokens: Any = None
    # Said back and otherwise without effect here.
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    # Would change the output and are not served: refused, not ignored.
    prompt: Any = None
    conversation: Any = None


class InputTokensDetails(Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0  #: nothing is charged for keeping a prompt


class OutputTokensDetails(Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class ResponseFault(Struct, kw_only=True):
    """`code` is a word of the published vocabulary, `type` this project's own."""

    code: str
    message: str
    type: str
    param: str | None = None


class IncompleteDetails(Struct, kw_only=True):
    reason: str


class ResponseObject(Struct, kw_only=True):
    """Every field of the published document, those without a meaning here too: clients that
    check it expect them."""

    id: str
    created_at: int
    model: str
    status: str
    completed_at: int | None = None
    output: list[Item] = []
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any]
    reasoning: dict[str, Any] | None = None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int = 0
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    truncation: str = "disabled"
    store: bool = True
    background: bool = False
    service_tier: str = "default"
    metadata: dict[str, str]
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    osaurus: dict[str, Any] | UnsetType = UNSET
    object: str = "response"


class StreamEvent(Struct, kw_only=True):
    """Any event of the stream; which fields it has is a matter of its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CompactBody(Struct, kw_only=True):
    model: str
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None


class CompactedConversation(Struct, kw_only=True):
    id: str
    created_at: int
    output: list[Item]
    usage: ResponseUsage
    object: str = "response.compaction"


class InputTokenCount(Struct, kw_only=True):
    input_tokens: int
    object: str = "response.input_tokens"


class ItemList(Struct, kw_only=True):
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool
    object: str = "list"


class DeletedResponse(Struct, kw_only=True):
    id: str
    deleted: bool = True
    object: str = "response"


def new_id(prefix: str) -> str:
    """Not to be guessed: whoever knows a response's id may read it."""
    return f"{prefix}_{secrets.token_hex(16)}"


encode = msgspec.json.Encoder(order="sorted").encode
