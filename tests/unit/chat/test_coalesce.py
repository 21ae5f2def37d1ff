"""Claims about pieces of text that go out together."""

from __future__ import annotations

import pytest

from osaurus.chat.coalesce import Coalescer
from osaurus.types.events import Chunk, Info, Reasoning, RuntimeEvent, TokenLogprob

INFO = Info(prompt_tokens=1)
EVENTS: list[RuntimeEvent] = [
    Reasoning("t"), Reasoning("u"), *map(Chunk, "abcdef"), Reasoning("v"), Chunk("g"), INFO,
]  # fmt: skip


def _passed(interval: int, events: list[RuntimeEvent]) -> list[RuntimeEvent]:
    pieces = Coalescer(interval)
    return [out for event in events for out in pieces.take(event)]


def test_one_at_a_time_changes_nothing() -> None:
    assert _passed(1, EVENTS) == EVENTS


def test_the_first_piece_goes_at_once_and_what_is_no_text_flushes() -> None:
    assert _passed(4, EVENTS) == [
        Reasoning("t"), Reasoning("u"), Chunk("a"), Chunk("bcde"), Chunk("f"), Reasoning("v"),
        Chunk("g"), INFO,
    ]  # fmt: skip


@pytest.mark.parametrize("interval", [2, 3, 100])
def test_no_text_and_no_logprob_is_lost(interval: int) -> None:
    logprobs = [
        TokenLogprob(token_id=i, text=str(i), data=b"%d" % i, logprob=-1.0) for i in range(7)
    ]
    events: list[RuntimeEvent] = [Chunk(str(i), (one,)) for i, one in enumerate(logprobs)]
    chunks = [out for out in _passed(interval, [*events, INFO]) if isinstance(out, Chunk)]
    assert "".join(chunk.text for chunk in chunks) == "0123456"
    assert [one for chunk in chunks for one in chunk.logprobs] == logprobs
