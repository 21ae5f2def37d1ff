"""Claims: thinking leads, white space falls between, and from the first character of the answer
on everything is data, whatever it looks like."""

from __future__ import annotations

import pytest

from osaurus.parsing.pieces import Rail
from osaurus.parsing.reasoning import REASONING_FORMATS, Start
from osaurus.parsing.shaped import ShapedMachine

ANSWER = '{"a": "</think> <think> [THINK] <channel|> Here is my response: <tool_call>{} "}'


def separate(name: str, start: Start, pieces: list[str]) -> tuple[str, str]:
    machine = ShapedMachine(REASONING_FORMATS[name], start)
    found = [piece for text in pieces for piece in machine.push(text)] + machine.finish()
    assert "".join(piece.text for piece in found) == "".join(pieces), "nothing is lost"
    assert not machine.has_failed
    by_rail = dict.fromkeys(Rail, "")
    for piece in found:
        by_rail[piece.rail] += piece.text
    return by_rail[Rail.REASONING], by_rail[Rail.CONTENT]


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("start", list(Start))
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_answer_is_data_to_its_last_character(name: str, start: Start, size: int) -> None:
    envelope = REASONING_FORMATS[name]
    for closer in envelope.closers:
        header = "thought\n" if envelope.header is not None else ""
        lead = {
            Start.CONTENT: envelope.openers[0] + header,
            Start.HEADER: header,
            Start.REASONING: "",
        }[start]
        text = f"{lead}a < b{closer}\n\n {ANSWER}"
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert separate(name, start, pieces) == ("a < b", ANSWER)


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_an_answer_without_thinking_is_all_data(name: str) -> None:
    for size in (1, 1000):
        pieces = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
        assert separate(name, Start.CONTENT, pieces) == ("", ANSWER)


def test_thinking_that_is_cut_is_thinking() -> None:
    machine = ShapedMachine(REASONING_FORMATS["think"], Start.REASONING)
    found = machine.push("so </thi")
    assert machine.in_reasoning
    found += machine.finish()
    assert machine.in_reasoning
    assert [(piece.rail, piece.text) for piece in found] == [
        (Rail.REASONING, "so "),
        (Rail.REASONING, "</thi"),
    ]


def test_a_half_opener_at_the_end_is_the_answer() -> None:
    assert separate("think", Start.CONTENT, ["<thi"]) == ("", "<thi")
    machine = ShapedMachine(REASONING_FORMATS["think"], Start.CONTENT)
    machine.push("<thi")
    assert [piece.text for piece in machine.abandon()] == ["<thi"]
