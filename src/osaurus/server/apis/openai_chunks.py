"""A streamed or whole answer in OpenAI's shapes, from `chat/`'s values.

Pure: no sockets, no clocks but the creation time. Every delta but the finishing one has the
key `content`, since some clients build their text part from it alone.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from osaurus.chat.completion import Choice, Completion, finish_reason, usage_of
from osaurus.chat.stream import ChoiceEvent
from osaurus.server.apis.openai_wire import (
    AnswerChoice,
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceLogprobs,
    ChunkChoice,
    CompletionTokensDetails,
    Delta,
    FunctionPiece,
    LogprobEntry,
    PrefillReport,
    PromptTokensDetails,
    ToolCallPiece,
    WireUsage,
)
from osaurus.types.events import (
    Chunk,
    Info,
    PrefillProgress,
    Reasoning,
    TokenLogprob,
    ToolInvocation,
)

#: Arguments of a call come in pieces of at most this many characters.
_ARGUMENT_PIECE = 1024

#: What OpenAI sends for a probability of zero: JSON has no infinity.
LOWEST_LOGPROB = -9999.0


def new_completion_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


def whole_answer(completion: Completion, model: str) -> ChatCompletion:
    return ChatCompletion(
        id=new_completion_id(),
        created=int(time.time()),
        model=model,
        choices=[_answer_choice(i, choice) for i, choice in enumerate(completion.choices)],
        usage=wire_usage([choice.info for choice in completion.choices]),
        prefix_hash=completion.prefix_hash or UNSET,
    )


class ChunkWriter:
    """The chunks of one streamed answer; one id and creation time for all of them."""

    def __init__(
        self, model: str, *, num_choices: int, include_usage: bool, prefix_hash: str = ""
    ) -> None:
        self._id = new_completion_id()
        self._created = int(time.time())
        self._model = model
        self._includes_usage = include_usage
        self._prefix_hash = prefix_hash
        self._num_calls = [0] * num_choices
        self._infos: dict[int, Info] = {}

    def opening(self) -> Iterator[ChatCompletionChunk]:
        for index in range(len(self._num_calls)):
            chunk = self._chunk(index, Delta(role="assistant", content=""))
            chunk.prefix_hash = self._prefix_hash or UNSET
            yield chunk

    def chunks(self, item: ChoiceEvent) -> Iterator[ChatCompletionChunk]:
        """What one event becomes; nothing for those that have no place on this wire."""
        index = item.index
        match item.event:
            case Chunk(text, logprobs):
                yield self._chunk(index, Delta(content=text), logprobs=wire_logprobs(logprobs))
            case Reasoning(text):
                yield self._chunk(index, Delta(content="", reasoning_content=text))
            case ToolInvocation() as call:
                for piece in self._call_pieces(index, call):
                    yield self._chunk(index, Delta(content="", tool_calls=[piece]))
            case Info() as info:
                self._infos[index] = info
                yield self._chunk(
                    index,
                    Delta(),
                    finish_reason=finish_reason(info, has_calls=self._num_calls[index] > 0),
                    osaurus=item.remarks or UNSET,
                )
            case _:
                pass

    def progress(self, event: PrefillProgress) -> ChatCompletionChunk:
        percent = round(100 * event.fraction, 1) if event.total > 0 else UNSET
        return self._with_choices(
            [],
            PrefillReport(
                stage=event.stage,
                completed=event.completed,
                total=event.total,
                percent=percent,
                detail=event.detail or UNSET,
            ),
        )

    def closing(self) -> Iterator[ChatCompletionChunk]:
        """The usage, for who asked for it, once every choice has ended."""
        if self._includes_usage:
            chunk = self._with_choices([])
            chunk.usage = wire_usage([info for _, info in sorted(self._infos.items())])
            yield chunk

    def _call_pieces(self, index: int, call: ToolInvocation) -> Iterator[ToolCallPiece]:
        number = self._num_calls[index]
        self._num_calls[index] += 1
        yield ToolCallPiece(
            index=number,
            id=call.call_id or _new_call_id(),
            type="function",
            function=FunctionPiece(name=call.name),
        )
        text = call.arguments_json
        for start in range(0, len(text), _ARGUMENT_PIECE):
            yield ToolCallPiece(
                index=number,
                function=FunctionPiece(arguments=text[start : start + _ARGUMENT_PIECE]),
            )

    def _chunk(
        self,
        index: int,
        delta: Delta,
        *,
        finish_reason: str | None = None,
        logprobs: ChoiceLogprobs | None = None,
        osaurus: Mapping[str, Any] | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        return self._with_choices(
            [
                ChunkChoice(
                    index=index,
                    delta=delta,
                    finish_reason=finish_reason,
                    logprobs=logprobs,
                    osaurus=osaurus,
                )
            ]
        )

    def _with_choices(
        self, choices: list[ChunkChoice], prefill: PrefillReport | UnsetType = UNSET
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=None if self._includes_usage else UNSET,
            osaurus_prefill=prefill,
        )


def wire_usage(infos: Sequence[Info]) -> WireUsage:
    usage = usage_of(infos)
    slowest_s = max(info.generate_time_s for info in infos)
    return WireUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        tokens_per_second=round(usage.completion_tokens / slowest_s, 2) if slowest_s > 0 else 0.0,
    )


def wire_logprobs(logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs | None:
    if not logprobs:
        return None
    entries = [_entry(token) for token in logprobs]
    for entry, token in zip(entries, logprobs, strict=True):
        entry.top_logprobs = [_entry(alternative) for alternative in token.top]
    return ChoiceLogprobs(content=entries)


def _answer_choice(index: int, choice: Choice) -> AnswerChoice:
    calls = [
        ToolCallPiece(
            id=call.call_id or _new_call_id(),
            type="function",
            function=FunctionPiece(name=call.name, arguments=call.arguments_json),
        )
        for call in choice.tool_calls
    ]
    return AnswerChoice(
        index=index,
        message=AnswerMessage(
            content=None if calls and not choice.text else choice.text,
            reasoning_content=choice.reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        finish_reason=choice.finish_reason,
        logprobs=wire_logprobs(choice.logprobs),
        osaurus=choice.remarks or UNSET,
    )


def _entry(token: TokenLogprob) -> LogprobEntry:
    is_finite = math.isfinite(token.logprob)
    return LogprobEntry(
        token=token.text,
        logprob=token.logprob if is_finite else LOWEST_LOGPROB,
        bytes=list(token.data),
    )


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
