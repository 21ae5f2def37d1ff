"""A whole answer as the fold of its stream, and what both forms say about its end.

In: `ChoiceEvent`s. Out: a `Completion`. Plain and streamed answers cannot differ, since the
plain one is made from the same events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from osaurus.chat.stream import ChatStream, ChoiceEvent
from osaurus.types.chat import FinishReason, Usage
from osaurus.types.events import Chunk, Info, Reasoning, TokenLogprob, ToolInvocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`logprobs` are those of the visible text; thinking has none on any wire."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolInvocation, ...]
    logprobs: tuple[TokenLogprob, ...]
    info: Info
    remarks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finish_reason(self) -> FinishReason:
        return finish_reason(self.info, has_calls=bool(self.tool_calls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    model_id: str
    choices: tuple[Choice, ...]
    prefix_hash: str = ""

    @property
    def usage(self) -> Usage:
        return usage_of([choice.info for choice in self.choices])


@dataclass(slots=True)
class _Fold:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolInvocation] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    info: Info | None = None
    remarks: Mapping[str, Any] = field(default_factory=dict)

    def add(self, event: ChoiceEvent) -> None:
        match event.event:
            case Chunk(text, logprobs):
                self.text.append(text)
                self.logprobs += logprobs
            case Reasoning(text):
                self.reasoning.append(text)
            case ToolInvocation() as call:
                self.tool_calls.append(call)
            case Info() as info:
                self.info, self.remarks = info, event.remarks
            case _:
                pass  # progress says nothing about the answer

    def choice(self) -> Choice:
        if self.info is None:
            raise RuntimeError("a choice ended without its Info")
        return Choice(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.tool_calls),
            logprobs=tuple(self.logprobs),
            info=self.info,
            remarks=self.remarks,
        )


async def fold(stream: ChatStream) -> Completion:
    """Read `stream` to its end. Raises what the stream raises; nothing partial comes back."""
    folds = [_Fold() for _ in range(stream.num_choices)]
    async for event in stream:
        folds[event.index].add(event)
    return Completion(
        model_id=stream.model_id,
        choices=tuple(choice_fold.choice() for choice_fold in folds),
        prefix_hash=stream.prefix_hash,
    )


def finish_reason(info: Info, *, has_calls: bool) -> FinishReason:
    """`length` exactly when the budget ended the answer, also behind a whole call; then calls."""
    return "tool_calls" if has_calls and info.stop_reason == "stop" else info.stop_reason


def usage_of(infos: Sequence[Info]) -> Usage:
    """The engine's own counts. The prompt is read once, whatever the number of choices: what
    a choice took over from another one of the same request did not come from a cache."""
    return Usage(
        prompt_tokens=infos[0].prompt_tokens,
        completion_tokens=sum(info.generated_tokens for info in infos),
        cached_tokens=min(info.cached_prompt_tokens for info in infos),
        reasoning_tokens=sum(info.reasoning_tokens for info in infos),
    )
