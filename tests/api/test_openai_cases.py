"""Cases from the field that are about limits and stop strings, on chat and legacy completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest

from api.conftest import Running, Start
from api.scripted_engine import Say
from osaurus.types.engine import GenerationRequest

#: What the model says, stops, limit of tokens, visible text, reason, tokens counted. Pieces that
#: a stop string falls across are cut at every byte here.
NEAR_MISSES = [
    (" Guest!", ["\n", "Guest:"], 7, " Guest!", "length", 7),
    ("The end<|", ["<|end|>"], None, "The end<|", "stop", 9),
    ("abababc", ["ababc"], None, "ab", "stop", 7),
    ("xSTOPy", ["STOP"], None, "x", "stop", 5),
    ("foo END bar HALT", ["HALT", "END"], None, "foo ", "stop", 7),
    ("née", ["é"], None, "n", "stop", 3),
    ("STOP", ["STOP"], None, "", "stop", 4),
    ("abc", ["zzz", ""], 3, "abc", "length", 3),
]


def ask(running: Running, legacy: bool, stream: bool, **fields: Any) -> Any:
    client = running.client()
    if legacy:
        return client.completions.create(model="m", prompt="x", stream=stream, **fields)
    messages: Any = [{"role": "user", "content": "x"}]
    return client.chat.completions.create(model="m", messages=messages, stream=stream, **fields)


def shown(choice: Any, legacy: bool) -> str:
    if legacy:
        return choice.text
    return (choice.delta if hasattr(choice, "delta") else choice.message).content or ""


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("said", "stops", "limit", "visible", "reason", "count"), NEAR_MISSES)
def test_f17_near_misses_of_stop_strings(
    start: Start,
    said: str,
    stops: Sequence[str],
    limit: int | None,
    visible: str,
    reason: str,
    count: int,
    legacy: bool,
) -> None:
    running = start(lambda request, index: [Say(said)])
    fields: dict[str, Any] = {"stop": stops, "max_tokens": limit}
    plain = ask(running, legacy, False, **fields)
    assert (shown(plain.choices[0], legacy), plain.choices[0].finish_reason) == (visible, reason)
    assert plain.usage.completion_tokens == count
    chunks = list(ask(running, legacy, True, stream_options={"include_usage": True}, **fields))
    text = ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += shown(choice, legacy)
            assert visible.startswith(text), "what was sent is a beginning of what is visible"
    assert text == visible
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [
        reason
    ]
    assert chunks[-1].usage.completion_tokens == count


@pytest.mark.parametrize("legacy", [False, True])
def test_f15_an_answer_says_length_exactly_when_its_budget_ended_it(
    start: Start, legacy: bool
) -> None:
    running = start(lambda request, index: [Say("12345678")])
    exact = ask(running, legacy, False, max_tokens=8)
    assert (exact.choices[0].finish_reason, exact.usage.completion_tokens) == ("length", 8)
    for limit in (9, 500):
        short = ask(running, legacy, False, max_tokens=limit)
        assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("stop", 8)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(running, legacy, False, max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_f39_penalties_out_of_range_are_refused_on_both(running: Running) -> None:
    for legacy in (False, True):
        for name in ("frequency_penalty", "presence_penalty"):
            for value in (2.5, -3):
                with pytest.raises(openai.BadRequestError) as caught:
                    ask(running, legacy, False, **{name: value})
                assert caught.value.param == name
    requests: list[GenerationRequest] = running.engine.requests
    assert requests == []
