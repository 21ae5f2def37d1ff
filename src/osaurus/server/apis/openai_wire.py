"""OpenAI chat completions on the wire: request and response bodies, field by field.

Shapes only. Fields that hold sampling numbers are left untyped here: `openai_request.py` checks
them against the one table of ranges, which gives a better message than a type would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    include_progress: bool | None = None


class MediaReference(Struct, kw_only=True):
    url: str = ""
    data: str = ""


class WirePart(Struct, kw_only=True):
    type: str
    text: str | None = None
    image_url: MediaReference | str | None = None
    input_audio: MediaReference | None = None
    video_url: MediaReference | str | None = None


class WireFunctionCall(Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class WireToolCall(Struct, kw_only=True):
    function: WireFunctionCall
    id: str = ""
    type: str = "function"


class WireMessage(Struct, kw_only=True):
    role: str
    content: str | list[WirePart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: Any = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class WireFunction(Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class WireTool(Struct, kw_only=True):
    """Wrapped, or flat with the function's own fields beside `type`."""

    type: str
    function: WireFunction | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class SamplingBody(Struct, kw_only=True):
    """What chat and legacy completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, Any] | None = None
    # The answer's shape; the others are the same by vLLM's names, and by those it had before.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # Numbers: their type and range are checked together.
    max_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    seed: Any = None
    min_tokens: Any = None


class ChatCompletionBody(SamplingBody, kw_only=True):
    messages: list[WireMessage]
    logprobs: bool | None = None
    tools: list[WireTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    # What other servers' clients call the same two.
    reasoning: Any = None
    thinking: Any = None
    think: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None
    max_completion_tokens: Any = None
    top_logprobs: Any = None
    # Would change the output and are not served: refused, not ignored.
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None


class LogprobEntry(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LogprobEntry] | UnsetType = UNSET


class ChoiceLogprobs(Struct, kw_only=True):
    content: list[LogprobEntry]
    refusal: None = None


class FunctionPiece(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallPiece(Struct, kw_only=True):
    """A whole call in a plain answer, without `index`; a piece of one in a stream."""

    function: FunctionPiece
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AnswerMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET
    refusal: None = None


class Delta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class AnswerChoice(Struct, kw_only=True):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None
    osaurus: Mapping[str, Any] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None
    osaurus: Mapping[str, Any] | UnsetType = UNSET


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    reasoning_tokens: int


class WireUsage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    tokens_per_second: float


class PrefillReport(Struct, kw_only=True):
    stage: str
    completed: int
    total: int
    percent: float | UnsetType = UNSET
    detail: str | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: WireUsage
    prefix_hash: str | UnsetType = UNSET
    object: str = "chat.completion"


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: WireUsage | UnsetType | None = UNSET
    osaurus_prefill: PrefillReport | UnsetType = UNSET
    prefix_hash: str | UnsetType = UNSET
    object: str = "chat.completion.chunk"


encode = msgspec.json.Encoder(order="sorted").encode
