"""Claim: whatever an engine says, a stream of events is one that Anthropic's clients can read,
and the plain message is what they put together from it."""

from __future__ import annotations

import hmac
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pydantic import TypeAdapter

from osaurus.server.apis.anthropic_events import INPUT_PIECE, MessageWriter, whole_message
from osaurus.server.apis.anthropic_signature import ThinkingSigner
from osaurus.server.apis.anthropic_wire import StreamEvent, encode, event_name
from osaurus.types.events import (
    Chunk,
    Info,
    PrefillProgress,
    Reasoning,
    RuntimeEvent,
    ToolCallProgress,
    ToolInvocation,
)

READ: Any = TypeAdapter(RawMessageStreamEvent)
TEXT = st.text("ab é\n\t 😀", max_size=6)
INPUT = st.dictionaries(st.text("ab", max_size=2), st.text('x"\\é', max_size=700), max_size=2)


class _Keyless:
    """Signs with the text itself, so that a test sees what was signed."""

    def __init__(self) -> None:
        self.signed: list[str] = []

    def begin(self) -> Any:
        self.signed.append("")
        return self

    def add(self, text: str) -> None:
        self.signed[-1] += text

    def text(self) -> str:
        return f"signed:{self.signed[-1]}"


def _writer(**options: Any) -> MessageWriter:
    return MessageWriter("m", begin_signature=_Keyless().begin, **options)


def _wire(event: StreamEvent) -> dict[str, Any]:
    return json.loads(encode(event))


def _written(*events: RuntimeEvent, **options: Any) -> list[StreamEvent]:
    writer = _writer(**options)
    written = list(writer.opening(10, 4))
    for event in events:
        written += writer.events(event)
    return written


class Order(RuleBasedStateMachine):
    """Feeds events in any order a model may give them, and reads the stream as a client does."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = _writer()
        self.events = list(self.writer.opening(10, 4))
        self.num_checked = 0
        self.snapshot: Any = None
        self.buffers: dict[int, bytes] = {}
        self.open: int | None = None
        self.num_blocks = 0
        self.kinds: list[str] = []
        self.texts: dict[str, list[str]] = {"text": [], "thinking": []}
        self.inputs: list[dict[str, str]] = []
        self.has_ended = False
        self.reason = ""

    def take(self, event: RuntimeEvent) -> None:
        self.events += self.writer.events(event)

    @precondition(lambda self: not self.has_ended)
    @rule(text=TEXT)
    def say(self, text: str) -> None:
        self.texts["text"].append(text)
        self.take(Chunk(text))

    @precondition(lambda self: not self.has_ended)
    @rule(text=TEXT)
    def think(self, text: str) -> None:
        self.texts["thinking"].append(text)
        self.take(Reasoning(text))

    @precondition(lambda self: not self.has_ended)
    @rule(arguments=INPUT)
    def call(self, arguments: dict[str, str]) -> None:
        self.inputs.append(arguments)
        text = json.dumps(arguments, ensure_ascii=False)
        self.take(ToolInvocation(name="f", arguments_json=text))

    @precondition(lambda self: not self.has_ended)
    @rule()
    def say_nothing_yet(self) -> None:
        self.take(ToolCallProgress("<tool"))
        self.take(PrefillProgress(stage="prefill", completed=1, total=2))

    @precondition(lambda self: not self.has_ended)
    @rule(reason=st.sampled_from(["stop", "length"]))
    def end(self, reason: Any) -> None:
        self.has_ended = True
        self.reason = reason
        self.take(Info(prompt_tokens=10, cached_prompt_tokens=4, stop_reason=reason))

    @precondition(lambda self: self.has_ended)
    @rule()
    def read_again(self) -> None:
        assert event_name(self.events[-1]) == "message_stop"

    @invariant()
    def events_are_in_order(self) -> None:
        for place in range(self.num_checked, len(self.events)):
            event = _wire(self.events[place])
            kind = event["type"]
            assert kind == event_name(self.events[place])
            assert (kind == "message_start") == (place == 0)
            assert (kind == "ping") == (place == 1)
            if kind == "content_block_start":
                assert self.open is None
                assert event["index"] == self.num_blocks
                self.open = self.num_blocks
                self.num_blocks += 1
                self.kinds.append(event["content_block"]["type"])
            elif kind == "content_block_delta":
                assert event["index"] == self.open
                self.check_delta(event["delta"])
            elif kind == "content_block_stop":
                assert event["index"] == self.open
                if self.kinds[-1] == "thinking":
                    assert self.snapshot.content[-1].signature.startswith("signed:")
                self.open = None
            elif kind in ("message_delta", "message_stop"):
                assert self.open is None
                assert self.has_ended
            if kind != "ping":
                self.snapshot = accumulate_event(
                    event=READ.validate_python(event),
                    current_snapshot=self.snapshot,
                    json_bufs=self.buffers,
                )
        self.num_checked = len(self.events)
        if self.has_ended:
            self.check_whole()

    def check_delta(self, delta: dict[str, Any]) -> None:
        legal = {
            "text": {"text_delta"},
            "thinking": {"thinking_delta", "signature_delta"},
            "tool_use": {"input_json_delta"},
        }
        assert delta["type"] in legal[self.kinds[-1]]
        if delta["type"] == "input_json_delta":
            assert 1 <= len(delta["partial_json"]) <= INPUT_PIECE
        if delta["type"] == "text_delta":
            assert delta["text"]

    def check_whole(self) -> None:
        names = [event_name(event) for event in self.events]
        assert names[-2:] == ["message_delta", "message_stop"]
        assert names.count("message_stop") == names.count("message_delta") == 1
        whole = json.loads(encode(whole_message(self.events)))
        content = self.snapshot.to_dict()["content"]
        assert content == whole["content"]
        calls = [block for block in content if block["type"] == "tool_use"]
        assert [call["input"] for call in calls] == self.inputs
        assert len({call["id"] for call in calls}) == len(calls)
        for kind, pieces in self.texts.items():
            seen = "".join(block[kind] for block in content if block["type"] == kind)
            assert "".join(seen.split()) == "".join("".join(pieces).split())
        assert not [block for block in content if block.get("text", "x").isspace()]
        for block in content:
            if block["type"] == "thinking":
                assert block["signature"] == f"signed:{block['thinking']}"
        ended = "tool_use" if calls else "end_turn"
        assert whole["stop_reason"] == ("max_tokens" if self.reason == "length" else ended)
        assert self.snapshot.usage.input_tokens + self.snapshot.usage.cache_read_input_tokens == 10


TestOrder = Order.TestCase
TestOrder.settings = settings(deadline=None)


def test_white_space_around_calls_is_no_text_block() -> None:
    events = _written(
        Chunk("\n"),
        ToolInvocation(name="f", arguments_json="{}"),
        Chunk("\n\n"),
        ToolInvocation(name="g", arguments_json="{}"),
        Info(prompt_tokens=10),
    )
    message = whole_message(events)
    assert [type(block).__name__ for block in message.content] == ["ToolUseBlock"] * 2


def test_white_space_before_text_stays() -> None:
    message = whole_message(_written(Chunk("\n"), Chunk(" a "), Info(prompt_tokens=10)))
    assert msgspec.to_builtins(message.content) == [{"type": "text", "text": "\n a "}]


def test_an_answer_without_anything_has_no_blocks() -> None:
    events = _written(Chunk(" "), Info(prompt_tokens=10))
    names = [event_name(event) for event in events]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]


def test_thinking_that_is_not_shown_has_its_signature_alone() -> None:
    events = _written(Reasoning("a"), Reasoning("b"), Info(prompt_tokens=1), shows_thinking=False)
    assert [event_name(event) for event in events][2:-2] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]
    (block,) = msgspec.to_builtins(whole_message(events).content)
    assert block == {"type": "thinking", "thinking": "", "signature": "signed:ab"}


@pytest.mark.parametrize(
    ("info", "calls", "reason", "sequence"),
    [
        ({}, 0, "end_turn", None),
        ({}, 1, "tool_use", None),
        ({"stop_reason": "length"}, 0, "max_tokens", None),
        ({"stop_reason": "length"}, 1, "max_tokens", None),
        ({"stop_string": "END"}, 0, "stop_sequence", "END"),
        ({"stop_string": "<|the bundle's own|>"}, 0, "end_turn", None),
        ({"stop_string": "END"}, 1, "tool_use", None),
    ],
)
def test_why_an_answer_ended(
    info: dict[str, Any], calls: int, reason: str, sequence: str | None
) -> None:
    call = ToolInvocation(name="f", arguments_json="{}")
    events = _written(*[call] * calls, Info(prompt_tokens=1, **info), stop_sequences=["END"])
    message = whole_message(events)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_input_is_cut_into_pieces_of_at_most_512_characters() -> None:
    text = json.dumps({"a": "x" * 2000})
    events = map(_wire, _written(ToolInvocation(name="f", arguments_json=text)))
    pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == INPUT_PIECE


@settings(deadline=None)
@given(pieces=st.lists(st.text(max_size=5), max_size=5))
def test_a_signature_is_an_hmac_of_the_text_however_it_came(pieces: list[str]) -> None:
    signer = ThinkingSigner(Path("/nonexistent/key"))
    signer._key = b"k" * 32  # pyright: ignore[reportPrivateUsage]
    signature = signer.begin()
    for piece in pieces:
        signature.add(piece)
    whole = signer.begin()
    whole.add("".join(pieces))
    assert signature.text() == whole.text() != ""
    expected = hmac.digest(b"k" * 32, "".join(pieces).encode(), "sha256")
    assert msgspec.json.decode(f'"{signature.text()}"', type=bytes) == expected


def test_the_key_is_the_installs_own_and_nobody_elses_to_read(tmp_path: Path) -> None:
    path = tmp_path / "config" / "signing.key"
    first, second = ThinkingSigner(path).begin(), ThinkingSigner(path).begin()
    other = ThinkingSigner(tmp_path / "other.key").begin()
    assert first.text() == second.text() != other.text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["signing.key"]


def test_a_key_that_cannot_be_kept_signs_until_the_server_stops(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "short.key").write_bytes(b"short")
    for path in (tmp_path / "file" / "signing.key", tmp_path / "short.key"):
        signer = ThinkingSigner(path)
        assert signer.begin().text() == signer.begin().text() != ""
