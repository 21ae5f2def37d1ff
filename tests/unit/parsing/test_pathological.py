"""Text meant to hurt: bounded time, bounded holding, no recursion, in every format."""

from __future__ import annotations

import time

import pytest

from osaurus.parsing.formats import TOOL_FORMATS
from unit.parsing.transcripts import TOOLS, WRITERS, every, machine_for, separate

SIZE = 50_000
FAMILIES = [*TOOL_FORMATS, "harmony"]


def attacks(family: str) -> list[str]:
    """Units to repeat: the family's markers, bodies cut at telling places, brackets, blanks."""
    units = ["<", "[", "\n{", "\n[", '\n{"name"', "<think>", "</think>", " ", "\n", "```\n"]
    tool_format = TOOL_FORMATS.get(family)
    if tool_format is not None:
        for opener in tool_format.openers:
            units += [opener.marker, opener.marker + "{", opener.marker + '{"a":']
        units += [bare.marker for bare in tool_format.bare if bare.marker]
        units += list(tool_format.orphans)
    else:
        units += ["<|channel|>", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"]
        units += ['<|channel|>commentary to=functions.put_note<|message|>{"a":']
    for write in WRITERS.get(family, ())[:1]:
        whole = write([("put_note", {"body": "x</parameter>", "meta": {"k": [1]}})])
        units += [whole[: len(whole) * part // 5] for part in range(1, 6)]
    return units


def seconds(family: str, text: str, *, thinking: bool, piece: int) -> float:
    machine = machine_for(family, TOOLS, thinking=thinking)
    start = time.process_time()
    separate(machine, every(text, piece))
    return time.process_time() - start


@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_markers_and_cut_calls_cost_linear_time(family: str) -> None:
    """A quadratic reader takes minutes here; the bound leaves room for a slow machine."""
    for unit in attacks(family):
        text = (unit * (SIZE // len(unit) + 1))[:SIZE]
        for thinking in (False, True):
            assert seconds(family, text, thinking=thinking, piece=SIZE) < 1.5, unit
        assert seconds(family, text[: SIZE // 10], thinking=False, piece=1) < 1.5, unit


@pytest.mark.parametrize("family", sorted(WRITERS))
@pytest.mark.parametrize("filler", ["x", '\\"', "<", "</function>", "[", "\n"])
def test_one_endless_unclosed_call_costs_linear_time(family: str, filler: str) -> None:
    whole = WRITERS[family][0]([("put_note", {"body": "@@"})])
    text = whole.partition("@@")[0] + filler * (SIZE // len(filler))
    for thinking in (False, True):
        assert seconds(family, text, thinking=thinking, piece=20) < 1.5


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_never_held_once_it_can_be_no_marker(family: str) -> None:
    machine = machine_for(family, TOOLS)
    sent = 0
    for index in range(1, 2000):
        sent += sum(len(piece.text) for piece in machine.push("word "))
        assert index * 5 - sent <= 64


@pytest.mark.parametrize("family", sorted(WRITERS))
def test_a_hundred_thousand_brackets_in_a_call_raise_nothing(family: str) -> None:
    whole = WRITERS[family][0]([("put_note", {"meta": "@@"})])
    head = whole.partition("@@")[0].rstrip('"')
    for bracket in ("[", '{"a":', "(", "{a:"):
        separate(machine_for(family, TOOLS), [head + bracket * 100_000])
