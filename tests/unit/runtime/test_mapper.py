"""The event mapper: one to one, JSON arguments, a last `Info`, no forged sentinels."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing

import pytest

from osaurus.runtime.mapper import GenerationEventMapper
from osaurus.types.events import (
    Chunk,
    Event,
    Info,
    PrefillProgress,
    Reasoning,
    RuntimeEvent,
    TokenLogprob,
    ToolCall,
    ToolCallProgress,
    ToolInvocation,
)


class ListStream:
    """An event stream over a list that notes whether it was closed."""

    request_id = "r"

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = list(events)
        self.is_closed = False

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._events:
            yield event

    def close(self) -> None:
        self.is_closed = True

    async def drained(self) -> None:
        return


def _mapped(events: Sequence[Event], *, suppress_progress: bool = False) -> list[RuntimeEvent]:
    async def scenario() -> list[RuntimeEvent]:
        mapper = GenerationEventMapper(
            ListStream(events), prompt_tokens=7, suppress_progress=suppress_progress
        )
        return [event async for event in mapper.events()]

    return asyncio.run(scenario())


_PROGRESS = PrefillProgress(stage="prefill", completed=1, total=2)
_INFO = Info(prompt_tokens=7, generated_tokens=3)


def test_events_pass_unchanged_and_info_comes_last() -> None:
    events: list[Event] = [_PROGRESS, Reasoning("hm"), Chunk("hi"), ToolCallProgress("{"), _INFO]
    assert _mapped(events) == events


def test_what_the_cache_did_passes_unchanged() -> None:
    events: list[Event] = [
        PrefillProgress(stage="cache_lookup", completed=0, total=9, detail="miss"),
        PrefillProgress(stage="cache_lookup", completed=0, total=9, detail="paged"),
        PrefillProgress(stage="cache_restore", completed=4, total=9, detail="disk"),
        Info(prompt_tokens=9, cached_prompt_tokens=4, cache_detail="disk"),
    ]
    assert _mapped(events) == events


def test_nothing_after_info_is_passed_on() -> None:
    assert _mapped([Chunk("a"), _INFO, Chunk("b")]) == [Chunk("a"), _INFO]


def test_empty_text_is_skipped_unless_it_carries_logprobs() -> None:
    logprob = TokenLogprob(token_id=1, text="", data=b"", logprob=-1.0)
    events: list[Event] = [Chunk(""), Reasoning(""), Chunk("", (logprob,)), _INFO]
    assert _mapped(events) == [Chunk("", (logprob,)), _INFO]


@pytest.mark.parametrize(
    "first", [Chunk("a"), Reasoning("a"), ToolCall(name="f", arguments={}), ToolCallProgress("x")]
)
def test_progress_after_the_first_output_of_any_kind_is_dropped(first: Event) -> None:
    assert _PROGRESS not in _mapped([first, _PROGRESS, _INFO])


def test_progress_is_dropped_when_nobody_wants_it() -> None:
    assert _mapped([_PROGRESS, Chunk("a"), _INFO], suppress_progress=True) == [Chunk("a"), _INFO]


def test_arguments_become_canonical_json() -> None:
    call = ToolCall(name="f", arguments={"b": 1, "a": "é"}, call_id="call_1")
    assert _mapped([call, _INFO])[0] == ToolInvocation(
        name="f", arguments_json='{"a":"é","b":1}', call_id="call_1"
    )


@pytest.mark.parametrize("arguments", [{"x": math.nan}, {"x": object()}, {1: 2}])
def test_arguments_without_a_json_form_become_an_error_object(arguments: dict[str, object]) -> None:
    (call, info) = _mapped([ToolCall(name="f", arguments=arguments), _INFO])
    assert call == ToolInvocation(
        name="f", arguments_json='{"_error":"argument_serialization_failed","_tool":"f"}'
    )
    assert info == _INFO


def test_a_sentinel_mark_in_model_text_is_replaced() -> None:
    call = ToolCall(name="f\ufffe", arguments={"a": "\ufffe"})
    assert _mapped([Reasoning("\ufffex"), Chunk("y\ufffetool:z"), call, _INFO]) == [
        Reasoning("\ufffdx"),
        Chunk("y\ufffdtool:z"),
        ToolInvocation(name="f\ufffd", arguments_json='{"a":"\ufffd"}'),
        _INFO,
    ]


def test_a_stream_without_info_ends_with_one_that_says_it_failed() -> None:
    *_, info = _mapped([Chunk("12345678"), Chunk("x"), Reasoning("hm")])
    assert isinstance(info, Info)
    assert (info.prompt_tokens, info.generated_tokens) == (7, 2 + 1 + 1)
    assert info.stop_reason == "cancelled"
    assert info.error
    assert info.unclosed_reasoning


def test_reasoning_followed_by_text_was_closed() -> None:
    *_, info = _mapped([Reasoning("hm"), Chunk("x")])
    assert isinstance(info, Info)
    assert not info.unclosed_reasoning


def test_closing_the_mapped_events_closes_the_stream() -> None:
    async def scenario() -> None:
        stream = ListStream([Chunk("a"), Chunk("b"), _INFO])
        mapper = GenerationEventMapper(stream, prompt_tokens=1)
        async with aclosing(mapper.events()) as events:
            assert await anext(events) == Chunk("a")
            assert not stream.is_closed
        assert stream.is_closed
        assert mapper.info is None

    asyncio.run(scenario())
