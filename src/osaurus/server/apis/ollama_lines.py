"""An answer as Ollama's lines, from `chat/`'s values.

Text and thinking become a line each as they come. Calls are held and go out whole, all of them in
one line before the last: some clients keep only the calls of the line that they saw last.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from osaurus.chat.completion import Choice
from osaurus.chat.stream import ChoiceEvent
from osaurus.server.apis.ollama_wire import (
    AnswerMessage,
    Call,
    CalledFunction,
    ChatLine,
    GenerateLine,
    Line,
    LogprobEntry,
)
from osaurus.types.events import Chunk, Info, Reasoning, TokenLogprob, ToolInvocation

Shape = Literal["chat", "generate"]

#: JSON has no infinity.
_LOWEST_LOGPROB = -9999.0


def timestamp(moment: datetime | None = None) -> str:
    """RFC 3339 in UTC."""
    moment = moment or datetime.now(UTC)
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class LineWriter:
    """The lines of one answer. `load_s` is set once the model is there; it counts from the
    writer's making, as the whole duration does."""

    def __init__(self, model: str, shape: Shape) -> None:
        self._model = model
        self._shape = shape
        self._started_s = time.monotonic()
        self._load_s = 0.0
        self._calls: list[ToolInvocation] = []

    def note_loaded(self) -> None:
        self._load_s = time.monotonic() - self._started_s

    def lines(self, item: ChoiceEvent) -> list[Line]:
        """What one event becomes; nothing for those that have no place on this wire."""
        match item.event:
            case Chunk(text, logprobs):
                return [self._line(text, logprobs=logprobs)]
            case Reasoning(text) if text:
                return [self._line(thinking=text)]
            case ToolInvocation() as call:
                self._calls.append(call)
                return []
            case Info() as info:
                held = [self._line(calls=self._calls)] if self._calls else []
                return [*held, self._end(self._line(), info, item.remarks)]
            case _:
                return []

    def whole(self, choice: Choice) -> Line:
        """The answer in one piece."""
        line = self._line(
            choice.text,
            thinking=choice.reasoning,
            calls=choice.tool_calls,
            logprobs=choice.logprobs,
        )
        return self._end(line, choice.info, choice.remarks)

    def without_answer(self, reason: Literal["load", "unload"]) -> Line:
        """For a request that asked for nothing but the model."""
        line = self._line()
        line.done, line.done_reason = True, reason
        return line

    def _end(self, line: Line, info: Info, remarks: Mapping[str, Any]) -> Line:
        line.done = True
        line.done_reason = "length" if info.stop_reason == "length" else "stop"
        line.total_duration = nanoseconds(time.monotonic() - self._started_s)
        line.load_duration = nanoseconds(self._load_s)
        line.prompt_eval_count = info.prompt_tokens
        line.prompt_eval_duration = nanoseconds(info.prompt_time_s)
        line.eval_count = info.generated_tokens
        line.eval_duration = nanoseconds(info.generate_time_s)
        line.osaurus = remarks or UNSET
        return line

    def _line(
        self,
        text: str = "",
        *,
        thinking: str = "",
        calls: Sequence[ToolInvocation] = (),
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Line:
        entries = _logprobs(logprobs)
        if self._shape == "generate":
            return GenerateLine(
                model=self._model,
                created_at=timestamp(),
                response=text,
                thinking=thinking or UNSET,
                logprobs=entries,
            )
        return ChatLine(
            model=self._model,
            created_at=timestamp(),
            message=AnswerMessage(
                content=text,
                thinking=thinking or UNSET,
                tool_calls=[_call(i, call) for i, call in enumerate(calls)] or UNSET,
            ),
            logprobs=entries,
        )


def _call(index: int, call: ToolInvocation) -> Call:
    return Call(
        id=call.call_id or f"call_{secrets.token_hex(12)}",
        function=CalledFunction(
            index=index, name=call.name, arguments=msgspec.Raw(call.arguments_json.encode())
        ),
    )


def _logprobs(logprobs: Sequence[TokenLogprob]) -> list[LogprobEntry] | UnsetType:
    entries = [_entry(token) for token in logprobs]
    for entry, token in zip(entries, logprobs, strict=True):
        entry.top_logprobs = [_entry(alternative) for alternative in token.top] or UNSET
    return entries or UNSET


def _entry(token: TokenLogprob) -> LogprobEntry:
    is_finite = math.isfinite(token.logprob)
    return LogprobEntry(
        token=token.text,
        logprob=token.logprob if is_finite else _LOWEST_LOGPROB,
        bytes=list(token.data),
    )


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
