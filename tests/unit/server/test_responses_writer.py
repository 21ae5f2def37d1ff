"""The events of an Open Responses answer: legal in whatever order the engine's come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osaurus.errors import (
    ContextLengthExceeded,
    EngineShutdown,
    OsaurusError,
    RequestFailed,
    ServerOverloaded,
    ToolChoiceUnsatisfied,
)
from osaurus.server.apis.responses_wire import ResponseObject, StreamEvent, encode
from osaurus.server.apis.responses_writer import ResponseWriter
from osaurus.types.events import (
    Chunk,
    Info,
    PrefillProgress,
    Reasoning,
    RuntimeEvent,
    StopReason,
    TokenLogprob,
    ToolCallProgress,
    ToolInvocation,
)
from responses_oracle import check_stream


def _writer(notes: Sequence[str] = ()) -> ResponseWriter:
    response = ResponseObject(
        id="resp_1",
        created_at=1,
        model="m",
        status="in_progress",
        text={"format": {"type": "text"}},
        temperature=1.0,
        top_p=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        metadata={},
    )
    return ResponseWriter(response, notes)


def _wire(events: Sequence[StreamEvent]) -> list[dict[str, Any]]:
    return [json.loads(encode(event)) for event in events]


def _info(reason: StopReason = "stop") -> Info:
    return Info(prompt_tokens=7, generated_tokens=5, reasoning_tokens=2, stop_reason=reason)


def _write(events: Sequence[RuntimeEvent], info: Info | None = None) -> list[dict[str, Any]]:
    writer = _writer()
    # Encoded as they are made, as a server does: nothing may change an event behind its back.
    sent = _wire(writer.opening())
    for event in events:
        sent += _wire(writer.take(event))
    return sent + _wire(writer.finish(info or _info(), {}))


def _logprob(text: str) -> TokenLogprob:
    top = (TokenLogprob(token_id=2, text="b", data=b"b", logprob=-float("inf")),)
    return TokenLogprob(token_id=1, text=text, data=text.encode(), logprob=-0.5, top=top)


CALL = ToolInvocation(name="f", arguments_json='{"x":1}', call_id="call_1")

_TEXTS = st.text(max_size=5)
_EVENTS = st.one_of(
    st.builds(Chunk, _TEXTS, st.lists(_TEXTS.map(_logprob), max_size=2).map(tuple)),
    st.builds(Reasoning, _TEXTS),
    st.builds(ToolCallProgress, _TEXTS),
    st.builds(
        ToolInvocation,
        name=st.text(min_size=1, max_size=5),
        arguments_json=st.text(max_size=2000),
        call_id=st.none() | st.text(min_size=1, max_size=5),
    ),
    st.just(PrefillProgress(stage="prefill", completed=1, total=2)),
)
_ERRORS: list[OsaurusError] = [
    RequestFailed("broken"),
    EngineShutdown("stopped"),
    ServerOverloaded("full", retry_after_s=3),
    ToolChoiceUnsatisfied("no call"),
]


@given(st.lists(_EVENTS, max_size=12), st.sampled_from(["stop", "length"]))
def test_any_order_of_the_engines_events_is_a_legal_stream(
    events: list[RuntimeEvent], reason: StopReason
) -> None:
    final = check_stream(_write(events, _info(reason)))
    assert final["status"] == ("completed" if reason == "stop" else "incomplete")
    said = "".join(event.text for event in events if isinstance(event, Chunk))
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    messages = [item for item in final["output"] if item["type"] == "message"]
    thoughts = [item for item in final["output"] if item["type"] == "reasoning"]
    calls = [item for item in final["output"] if item["type"] == "function_call"]
    assert "".join(item["content"][0]["text"] for item in messages) == said
    assert "".join(item["summary"][0]["text"] for item in thoughts) == thought
    wanted = [event for event in events if isinstance(event, ToolInvocation)]
    assert [(item["name"], item["arguments"]) for item in calls] == [
        (call.name, call.arguments_json) for call in wanted
    ]
    assert all(item["content"][0]["text"] for item in messages)  # none was opened for nothing


@given(st.lists(_EVENTS, max_size=8), st.sampled_from(_ERRORS), st.booleans())
def test_an_error_anywhere_ends_a_legal_stream(
    events: list[RuntimeEvent], error: OsaurusError, has_begun: bool
) -> None:
    writer = _writer()
    sent: list[dict[str, Any]] = []
    if has_begun:
        sent += _wire(writer.opening())
        for event in events:
            sent += _wire(writer.take(event))
    final = check_stream(sent + _wire(writer.fail(error)))
    assert final["status"] == "failed"
    assert final["error"]["type"] == error.code


@given(st.lists(_EVENTS, max_size=8), st.lists(_EVENTS, max_size=3))
def test_nothing_follows_the_end_of_a_cancelled_answer(
    events: list[RuntimeEvent], later: list[RuntimeEvent]
) -> None:
    writer = _writer()
    sent = _wire(writer.opening())
    for event in events:
        sent += _wire(writer.take(event))
    sent += _wire(writer.cancel())
    for event in later:
        assert writer.take(event) == []
    assert writer.finish(_info(), {}) == []
    assert writer.fail(RequestFailed("late")) == []
    assert check_stream(sent)["status"] == "cancelled"


def test_thinking_that_goes_on_after_text_is_an_item_of_its_own() -> None:
    final = check_stream(_write([Reasoning("a"), Chunk("b"), Reasoning("c"), Chunk("d"), CALL]))
    kinds = [item["type"] for item in final["output"]]
    assert kinds == ["reasoning", "message", "reasoning", "message", "function_call"]


def test_a_cut_answer_says_which_item_was_cut() -> None:
    final = check_stream(_write([Reasoning("a"), Chunk("b")], _info("length")))
    assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["completed_at"] is None


def test_arguments_come_in_pieces_of_at_most_512_characters() -> None:
    arguments = json.dumps({"x": "y" * 2000})
    events = _write([ToolInvocation(name="f", arguments_json=arguments)])
    pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == arguments
    assert max(map(len, pieces)) == 512


def test_logprobs_of_withheld_text_travel_with_the_text_that_shows_it() -> None:
    events = _write([Chunk("", (_logprob("a"),)), Chunk("ab", (_logprob("b"),)), Chunk("c")])
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in e["logprobs"]] for e in deltas] == [["a", "b"], []]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["a", "b"]
    assert part["logprobs"][0]["top_logprobs"][0]["logprob"] == -9999.0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextLengthExceeded(9, 8), "context_length_exceeded"),
        (ServerOverloaded("full", retry_after_s=3), "rate_limit_exceeded"),
        (ToolChoiceUnsatisfied("no call"), "invalid_prompt"),
        (RequestFailed("broken"), "server_error"),
    ],
)
def test_a_failure_has_a_code_that_clients_know(error: OsaurusError, code: str) -> None:
    failed = _wire(_writer().fail(error))[-1]["response"]["error"]
    assert failed["code"] == code
    assert error.message in failed["message"]


def test_an_overloaded_servers_advice_is_in_the_words_that_clients_look_for() -> None:
    failed = _wire(_writer().fail(ServerOverloaded("full", retry_after_s=3)))[-1]
    assert "try again in 3s" in failed["response"]["error"]["message"]


def test_what_was_left_out_and_what_is_remarked_are_said_together() -> None:
    writer = _writer(["left out"])
    (end,) = _wire(writer.finish(_info(), {"tool_call_error": True, "notes": ["merged"]}))[-1:]
    assert end["response"]["osaurus"] == {
        "tool_call_error": True,
        "notes": ["left out", "merged"],
    }
