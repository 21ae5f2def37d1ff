"""Ollama's chat and generate on the wire: bodies in, lines out, field by field.

Shapes only. What the fields mean is in `ollama_request.py`, how an answer becomes lines in
`ollama_lines.py`. The numbers of `options` are checked against the one table of ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from osaurus.server.apis.openai_wire import WireTool


class PastFunction(Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] | str | None = None


class PastCall(Struct, kw_only=True):
    function: PastFunction
    id: str = ""


class OllamaMessage(Struct, kw_only=True):
    """`name` is what `tool_name` was called at first."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[PastCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class AnswerBody(Struct, kw_only=True):
    """What both ways of asking for an answer share."""

    model: str
    stream: bool | None = None
    options: dict[str, Any] | None = None
    format: Any = None
    think: Any = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: Any = None


class ChatBody(AnswerBody, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[WireTool] | None = None


class GenerateBody(AnswerBody, kw_only=True):
    """`template` (Go's notation) and `context` (tokens of an earlier answer) are not read."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


class CalledFunction(Struct, kw_only=True):
    index: int
    name: str
    arguments: msgspec.Raw


class Call(Struct, kw_only=True):
    id: str
    function: CalledFunction


class AnswerMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class LogprobEntry(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LogprobEntry] | UnsetType = UNSET


class Line(Struct, kw_only=True):
    """One line. Those of the second half stand in the last one only; durations are nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    logprobs: list[LogprobEntry] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    osaurus: Mapping[str, Any] | UnsetType = UNSET


class ChatLine(Line, kw_only=True):
    message: AnswerMessage


class GenerateLine(Line, kw_only=True):
    response: str = ""
    thinking: str | UnsetType = UNSET
