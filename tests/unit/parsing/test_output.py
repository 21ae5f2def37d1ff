"""The pipeline's promise: order, stop strings and each shown token's logprob exactly once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from osaurus.parsing.output import OutputPipeline
from osaurus.parsing.pieces import Piece, Rail
from osaurus.types import engine
from osaurus.types.events import (
    Chunk,
    Event,
    Reasoning,
    TokenLogprob,
    ToolCall,
    ToolCallProgress,
)


@dataclass
class Bytes:
    """A tokenizer whose ids are indices into a list of byte strings."""

    vocabulary: list[bytes] = field(default_factory=list)

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary[token_id]


class Scripted:
    """A machine that gives each pushed text the next rail of its script."""

    has_failed = False
    failures = ()

    def __init__(self, *script: Rail | ToolCall | Exception, in_reasoning: bool = False) -> None:
        self.script = list(script)
        self.in_reasoning = in_reasoning
        self.owed = ""

    def push(self, text: str) -> list[Piece]:
        step = self.script.pop(0)
        if isinstance(step, Exception):
            self.owed = text
            raise step
        if isinstance(step, ToolCall):
            return [Piece(Rail.PROTOCOL, text, (step,))]
        return [Piece(step, text)]

    def finish(self) -> list[Piece]:
        return []

    def abandon(self) -> list[Piece]:
        return [Piece(Rail.CONTENT, self.owed)]


def logprob(token_id: int, data: bytes) -> TokenLogprob:
    return TokenLogprob(
        token_id=token_id, text=data.decode("utf-8", "replace"), data=data, logprob=-float(token_id)
    )


def run(
    tokens: Sequence[bytes],
    *,
    stop: Sequence[str] = (),
    machine: Scripted | None = None,
    finish: bool = True,
) -> tuple[OutputPipeline, list[Event]]:
    pipeline = OutputPipeline(Bytes(list(tokens)), stop=stop, machine=machine)
    events: list[Event] = []
    for token_id, data in enumerate(tokens):
        if pipeline.halted:
            break
        events += pipeline.push(token_id, logprob(token_id, data))
    if finish:
        events += pipeline.finish()
    return pipeline, events


def visible(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Chunk))


def shown_ids(events: Sequence[Event]) -> list[int]:
    return [
        each.token_id
        for event in events
        if isinstance(event, Chunk | Reasoning)
        for each in event.logprobs
    ]


def test_it_is_the_pipeline_that_the_engine_expects() -> None:
    pipeline: engine.OutputPipeline = OutputPipeline(Bytes())
    assert pipeline.finish() == []


def test_without_machine_and_stops_each_token_is_a_chunk() -> None:
    _, events = run([b"Hello", b" world"])
    assert [event.text for event in events if isinstance(event, Chunk)] == ["Hello", " world"]
    assert shown_ids(events) == [0, 1]


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "halted"),
    [
        ([b" G", b"ue", b"st", b"!"], ["\n", "Guest:"], " Guest!", False),
        ([b"The", b" end", b"<|"], ["<|end|>"], "The end<|", False),
        ([b"ab", b"ab", b"abc"], ["ababc"], "ab", True),
        ([b"x", b"STOPy"], ["STOP"], "x", True),
        ([b"foo E", b"ND bar HA", b"LT"], ["HALT", "END"], "foo ", True),
        ([b"n", b"\xc3", b"\xa9", b"e"], ["é"], "n", True),
        ([b"STOP"], ["STOP"], "", True),
        ([b"a", b"b", b"c"], ["zzz"], "abc", False),
    ],
)
def test_stop_strings_over_tokens(
    pieces: list[bytes], stops: list[str], text: str, halted: bool
) -> None:
    pipeline, events = run(pieces, stop=stops)
    assert visible(events) == text
    assert pipeline.halted is halted
    assert (pipeline.stop_string in stops) is halted


def test_after_a_match_push_and_finish_say_nothing() -> None:
    pipeline, _ = run([b"aSTOPb", b"c"], stop=["STOP"], finish=False)
    assert pipeline.stop_string == "STOP"
    assert pipeline.push(1) == []
    assert pipeline.finish() == []


def test_tokens_of_a_character_that_spans_them_travel_together() -> None:
    _, events = run([b"n", b"\xc3", b"\xa9", b"e"])
    assert [shown_ids([event]) for event in events] == [[0], [1, 2], [3]]
    joined = b"".join(each.data for e in events if isinstance(e, Chunk) for each in e.logprobs)
    assert joined.decode() == "née"


def test_held_tokens_travel_with_the_chunk_that_shows_them() -> None:
    _, events = run([b"a", b"ST", b"O", b"x"], stop=["STOP"])
    assert [(event.text, shown_ids([event])) for event in events if isinstance(event, Chunk)] == [
        ("a", [0]),
        ("STOx", [1, 2, 3]),
    ]


def test_tokens_of_a_matched_stop_are_left_out_and_a_cut_token_is_kept() -> None:
    _, events = run([b"foo E", b"N", b"D bar"], stop=["END"])
    assert (visible(events), shown_ids(events)) == ("foo ", [0])


def test_tokens_without_bytes_are_delivered_once() -> None:
    _, events = run([b"a", b"", b"b", b""])
    assert shown_ids(events) == [0, 1, 2, 3]
    assert events[-1] == Chunk("", (logprob(3, b""),))


def test_stops_do_not_see_reasoning() -> None:
    machine = Scripted(Rail.REASONING, Rail.CONTENT)
    pipeline, events = run([b"STOP", b"ok"], stop=["STOP"], machine=machine)
    assert not pipeline.halted
    assert [type(event) for event in events] == [Reasoning, Chunk]


def test_stops_match_across_reasoning_because_they_see_content_only() -> None:
    machine = Scripted(Rail.CONTENT, Rail.REASONING, Rail.CONTENT)
    pipeline, events = run([b"aST", b"hm", b"OP"], stop=["STOP"], machine=machine)
    assert pipeline.halted
    assert visible(events) == "a"


def test_held_text_is_sent_before_the_call_it_precedes() -> None:
    call = ToolCall(name="f", arguments={})
    _, events = run([b"xST", b"<c>"], stop=["STOP"], machine=Scripted(Rail.CONTENT, call))
    kinds = [type(event) for event in events]
    assert kinds == [Chunk, ToolCallProgress, Chunk, ToolCall]
    assert visible(events) == "xST"
    assert shown_ids(events) == [0]


def test_reasoning_tokens_include_their_markers() -> None:
    machine = Scripted(Rail.THINK_MARK, Rail.REASONING, Rail.THINK_MARK, Rail.CONTENT)
    pipeline, events = run([b"<think>", b"a", b"</think>", b"b"], machine=machine)
    assert pipeline.reasoning_tokens == 3
    assert shown_ids(events) == [1, 3]


def test_the_unclosed_flag_is_the_machine_s_state_before_its_flush() -> None:
    pipeline, _ = run([b"a"], machine=Scripted(Rail.REASONING, in_reasoning=True))
    assert pipeline.unclosed_reasoning


def test_a_parser_that_raises_costs_the_parsing_and_not_the_answer() -> None:
    machine = Scripted(Rail.CONTENT, RuntimeError("fault"))
    pipeline, events = run([b"a", b"b", b"c"], machine=machine)
    assert visible(events) == "abc"
    assert pipeline.tool_call_protocol_failure


def test_joined_logprobs_are_the_visible_text_at_any_tokenization() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(500):
        text = "".join(rng.choices(["a", "b", "ST", "é", "😀", "🇨", "O", "P"], k=20))
        data, tokens = text.encode(), []
        while data:
            cut = rng.randrange(0, 5)
            tokens.append(data[:cut])
            data = data[cut:]
        pipeline, events = run(tokens, stop=["STOP"])
        ids = shown_ids(events)
        assert ids == list(range(len(ids))), f"seed {seed}"
        shown = b"".join(tokens[i] for i in ids)
        if pipeline.halted:
            assert shown.startswith(visible(events).encode()), f"seed {seed}"
        else:
            assert shown.decode() == visible(events) == text, f"seed {seed}"
