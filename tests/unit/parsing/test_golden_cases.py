"""Every golden transcript gives its expected rails and calls, however its text is cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from osaurus.parsing.output import OutputPipeline
from osaurus.types.chat import Tool
from osaurus.types.events import Chunk, Event, Reasoning, TokenLogprob, ToolCall
from unit.parsing.transcripts import Outcome, cut, every, machine_for, read, separate

CASES: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "golden" / "tool_parsing.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])


def tools_of(case: dict[str, Any]) -> tuple[Tool, ...]:
    functions = (tool["function"] for tool in case["tools"] or ())
    return tuple(
        Tool(name=function["name"], parameters=function.get("parameters", {}))
        for function in functions
    )


def run(case: dict[str, Any], pieces: list[str]) -> Outcome:
    thinking = case["start_in_reasoning"]
    return separate(machine_for(case["family"], tools_of(case), thinking=thinking), pieces)


def is_same(given: Any, wanted: Any) -> bool:
    """Equal as JSON values: numbers by value, but `true` is never `1`."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, dict) and isinstance(wanted, dict):
        return list(given) == list(wanted) and all(is_same(given[k], wanted[k]) for k in given)
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(is_same, given, wanted))
    return given == wanted


def assert_expected(outcome: Outcome, wanted: dict[str, Any]) -> None:
    assert outcome.content.strip() == wanted["content"].strip()
    assert outcome.reasoning.strip() == wanted["reasoning"].strip()
    assert outcome.unclosed is wanted["unclosed_reasoning"]
    calls = [{"name": name, "arguments": arguments} for name, arguments in outcome.calls]
    assert is_same(calls, wanted["tool_calls"]), calls


@each_case
def test_the_case_holds_whole_and_in_pieces_of_1_2_3_and_7_characters(case: dict[str, Any]) -> None:
    text = case["text"]
    whole = run(case, [text])
    assert_expected(whole, case["expect"])
    for size in (1, 2, 3, 7):
        assert run(case, every(text, size)).as_json() == whole.as_json(), size


@each_case
def test_the_case_holds_under_200_random_splits_and_every_single_cut(case: dict[str, Any]) -> None:
    text = case["text"]
    whole = run(case, [text]).as_json()
    for place in range(1, len(text)):
        assert run(case, [text[:place], text[place:]]).as_json() == whole, place
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(200):
        cuts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12))]
        pieces = cut(text, cuts)
        assert run(case, pieces).as_json() == whole, f"seed {seed}: {pieces}"


@each_case
def test_no_beginning_of_the_case_has_a_call_that_the_whole_has_not(case: dict[str, Any]) -> None:
    text = case["text"]
    whole = run(case, [text])
    for length in range(len(text)):
        part = run(case, [text[:length]])
        known = [json.dumps(call) for call in whole.calls]
        assert [json.dumps(call) for call in part.calls] == known[: len(part.calls)], text[:length]


class ByteTokens:
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


@each_case
def test_through_the_pipeline_byte_by_byte_each_shown_byte_has_its_logprob(
    case: dict[str, Any],
) -> None:
    """Tokens of one byte cut every marker and character; the rails' logprobs spell the rails."""
    machine = machine_for(case["family"], tools_of(case), thinking=case["start_in_reasoning"])
    pipeline = OutputPipeline(ByteTokens(), machine=machine)
    events: list[Event] = []
    data = case["text"].encode()
    for place, byte in enumerate(data):
        token = TokenLogprob(token_id=byte, text="", data=data[place : place + 1], logprob=-place)
        events += pipeline.push(byte, token)
    events += pipeline.finish()

    def of(kind: type[Chunk | Reasoning]) -> tuple[str, list[TokenLogprob]]:
        rail = [event for event in events if isinstance(event, kind)]
        logprobs = [each for event in rail for each in event.logprobs]
        return "".join(event.text for event in rail), logprobs

    calls = tuple((e.name, dict(e.arguments)) for e in events if isinstance(e, ToolCall))
    for text, logprobs in (of(Chunk), of(Reasoning)):
        assert b"".join(each.data for each in logprobs).decode() == text
        places = [-each.logprob for each in logprobs]
        assert places == sorted(set(places))
    outcome = Outcome(
        content=of(Chunk)[0],
        reasoning=of(Reasoning)[0],
        calls=calls,
        unclosed=pipeline.unclosed_reasoning,
        failed=pipeline.tool_call_protocol_failure,
    )
    assert outcome.as_json() == run(case, [case["text"]]).as_json()
    assert (pipeline.reasoning_tokens > 0) >= bool(outcome.reasoning)


def test_all_cases_are_here() -> None:
    assert len(CASES) == 171
    assert len({case["id"] for case in CASES}) == 171


def test_a_parallel_call_keeps_its_order_and_ids_differ_in_every_family() -> None:
    families = sorted({case["family"] for case in CASES if len(case["expect"]["tool_calls"]) > 1})
    for case in (c for c in CASES if len(c["expect"]["tool_calls"]) > 1):
        machine = machine_for(case["family"], tools_of(case), thinking=case["start_in_reasoning"])
        pieces = [*machine.push(case["text"]), *machine.finish()]
        ids = [call.call_id for piece in pieces for call in piece.calls]
        assert None not in ids
        assert len(set(ids)) == len(case["expect"]["tool_calls"]), case["id"]
    assert len(families) >= 15


def test_a_marker_that_thinking_only_mentions_stays_thinking() -> None:
    tool = Tool(name="get_weather", parameters={"type": "object"})
    for thought in (
        'I could answer with `<tool_call>{"name":"x"}</tool_call>` or with <thought>, but no.',
        'I could answer with `<tool_call>{"name":"x"}</tool_call>` or not. ' * 200,
        "only <tool_call>",
        "only <tool_call> and <function= here",
        "a <function= that never ends",
    ):
        for family in ("json", "xml_function", "nemotron", "glm4", "step"):
            text = f"{thought}</think>Done."
            for size in (1, 5, len(text)):
                outcome = separate(machine_for(family, [tool], thinking=True), every(text, size))
                assert (outcome.reasoning, outcome.content) == (thought, "Done."), family
                assert not outcome.calls
                assert not outcome.failed


def test_a_mention_that_is_no_call_is_sent_on_at_once() -> None:
    machine = machine_for("json", [Tool(name="get_weather")], thinking=True)
    sent = "".join(p.text for p in machine.push('so `<tool_call>{"name":"x"}</tool_call>` it'))
    assert sent.endswith('{"name":"x"}</tool_call>` it')


def test_a_quoted_call_in_a_fence_stays_text_when_no_tools_were_offered() -> None:
    text = 'Like so:\n```xml\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n```\nOk.'
    assert read("json", text).content == text
    after = text + '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>!'
    assert read("json", after).content == text + "\n!"
