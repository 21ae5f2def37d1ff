"""For every format: what was written as prose, thought and calls is read back as exactly that.

Responses are composed of pieces whose rails are known, written by the independent writers of
`unit/parsing/transcripts.py`, and cut at random places. The reader has to give the same
composition whatever the cuts, and never show a marker.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osaurus.parsing.formats import TOOL_FORMATS
from osaurus.parsing.reasoning import REASONING_FORMATS
from unit.parsing.transcripts import (
    TOOLS,
    WRITERS,
    Call,
    machine_for,
    read,
    reasoning_of,
    separate,
)

#: Prose with what looks like markup, but is none in any format.
WORDS = (
    "Hello", "a < b", "x[1]", "i, j", "{y}", "</div>", "<b>bold</b>", "call: me", "50 %",
    "naïve 世界 😀", "f(x)", "<", "<<", "name", '"quoted"', "\\n", "```", "Map<K, V>", "one\ntwo",
)  # fmt: skip
words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)

#: Text that is awkward inside an argument: quotes, brackets, breaks, other layers' markers.
AWKWARD = (
    "plain", "two words", "é世😀", 'say "hi"', "it's", "{", "}", "[", "]", ",", ":", "a\nb", "a\tb",
    "\\", "\\n", "</tool_call>", "<tool_call>", "<think>", "</think>", "null", "42", "true",
    "```json", "<function=f>", "[TOOL_CALLS]", "<|tool_call_end|>", "call:f{}", "<br", "<", "&amp;",
)  # fmt: skip
awkward = st.lists(st.sampled_from(AWKWARD), min_size=1, max_size=4).map(" ".join)
scalars = st.one_of(st.booleans(), st.integers(-(10**12), 10**12), awkward, st.none())
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("klm"), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {"body": awkward},
    optional={
        "count": st.integers(-(2**70), 2**70),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "pinned": st.booleans(),
        "tags": st.lists(awkward, max_size=3),
        "meta": st.dictionaries(st.sampled_from("klm"), json_values, max_size=3),
    },
)
calls = st.one_of(
    st.tuples(st.just("put_note"), arguments), st.tuples(st.just("list.notes"), st.just({}))
)
cuts = st.lists(st.integers(0, 3000), max_size=12)
each_notation = pytest.mark.parametrize(
    ("family", "notation"),
    [(family, index) for family, writers in WRITERS.items() for index in range(len(writers))],
)
#: Values that a notation cannot carry, since nothing in it is escaped.
UNWRITABLE: dict[str, Sequence[str]] = {
    "zaya_xml": ("<br",),
    "hunyuan": ("<tool_call>", "</tool_call>"),
}


def is_writable(family: str, batch: Sequence[Call]) -> bool:
    text = json.dumps(batch, ensure_ascii=False)
    return not any(one in text for one in UNWRITABLE.get(family, ()))


def think(family: str, text: str) -> str | None:
    """`text` as a block of the family's envelope, if blocks can stand anywhere."""
    name = reasoning_of(family)
    envelope = REASONING_FORMATS.get(name) if name else None
    if envelope is None or envelope.only_first:
        return None
    header = "thought\n" if envelope.header else ""
    return f"{envelope.openers[0]}{header}{text}{envelope.closers[0]}"


@each_notation
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_composed_response_is_read_back_whatever_the_cuts(
    family: str, notation: int, data: st.DataObject
) -> None:
    write = WRITERS[family][notation]
    text, content, reasoning = "", "", ""
    wanted: list[Call] = []
    for kind in data.draw(st.lists(st.sampled_from(["prose", "call", "think"]), max_size=6)):
        if kind == "prose":
            prose = data.draw(words)
            text += prose
            content += prose
        elif kind == "call":
            batch = data.draw(st.lists(calls, min_size=1, max_size=3))
            if not is_writable(family, batch):
                continue
            text += write(batch)
            wanted += batch
        else:
            thought = data.draw(words)
            block = think(family, thought)
            if block is not None:
                text += block
                reasoning += thought
    # A last `<` right behind a call would count as the next marker, cut off.
    text, content = text + "End.", content + "End."
    outcome = read(family, text, TOOLS, cuts=data.draw(cuts))
    assert outcome.content == content
    assert outcome.reasoning == reasoning
    assert json.dumps(outcome.calls) == json.dumps(wanted)
    assert not outcome.unclosed
    assert not outcome.failed


@each_notation
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_response_cut_off_anywhere_has_no_foreign_call_and_shows_no_marker(
    family: str, notation: int, data: st.DataObject
) -> None:
    batch = data.draw(st.lists(calls, min_size=1, max_size=2))
    if not is_writable(family, batch):
        return
    prose = data.draw(words)
    text = prose + WRITERS[family][notation](batch)
    length = data.draw(st.integers(len(prose) + 5, len(text)))
    outcome = read(family, text[:length], TOOLS, cuts=data.draw(cuts))
    # A list of Python arguments or JSON text is delimited, so a call is whole or not there.
    assert json.dumps(list(outcome.calls)) == json.dumps(batch[: len(outcome.calls)])
    assert outcome.content == prose


@each_notation
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_without_offered_tools_envelopes_leave_no_trace(
    family: str, notation: int, data: st.DataObject
) -> None:
    batch = data.draw(st.lists(calls, min_size=1, max_size=2))
    prose = data.draw(words).replace("```", "")
    if not is_writable(family, batch):
        return
    text = prose + WRITERS[family][notation](batch)
    outcome = read(family, text, (), cuts=data.draw(cuts))
    assert (outcome.content, outcome.calls, outcome.failed) == (prose, (), False)


@pytest.mark.parametrize("family", [*TOOL_FORMATS, "harmony"])
@settings(max_examples=20, deadline=None)
@given(text=words, cuts=cuts, offered=st.booleans())
def test_text_without_any_marker_is_content_character_for_character(
    family: str, text: str, cuts: list[int], offered: bool
) -> None:
    assert read(family, text, TOOLS if offered else (), cuts=cuts).content == text


def fragments(family: str) -> list[str]:
    """Pieces of the family's protocol, whole and broken, and of everything it may hold."""
    markers: list[str] = []
    tool_format = TOOL_FORMATS.get(family)
    if tool_format is not None:
        markers += [opener.marker for opener in tool_format.openers]
        markers += [bare.marker for bare in tool_format.bare if bare.marker]
        markers += [*tool_format.orphans, *tool_format.wrappers]
        markers += [closer for opener in tool_format.openers for closer in opener.closers]
    else:
        markers += ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis"]
        markers += ["final", "commentary", " to=functions.put_note", "<|constrain|>json"]
    envelope = REASONING_FORMATS.get(reasoning_of(family) or "")
    if envelope is not None:
        markers += [*envelope.openers, *envelope.closers]
    markers *= 3
    markers += [marker[: len(marker) // 2] for marker in markers] + [m[:-1] for m in markers]
    bodies = [
        "put_note", "list.notes", "body", "count", "<function=put_note>", "<parameter=body>",
        '{"name": "put_note", "arguments": {"body": "x"}}', "<parameter=count>", "</parameter>",
        "</function>", "<parameter>", "<name>", "</name>", "<value>", "</value>", "</invoke>",
        '<invoke name="put_note">', '<parameter name="body">', "<arg_key>", "</arg_key>",
        "<arg_value>", "</arg_value>", "<tool_sep>", '<|"|>', "<escape>", "[ARGS]", "[CALL_ID]",
        "call:put_note{", '<｜DSML｜invoke name="put_note">', "</｜DSML｜parameter>",
        '<｜DSML｜parameter name="body" string="true">', "</｜DSML｜invoke>", "<｜tool▁sep｜>",
        "<|tool_call_argument_begin|>", "put_note(body='x')", ".call(", '"name"', '"arguments"',
        '{"', '"}', "[{", "}]", '\n[{"name": "put_note", "arguments": {}}]',
        "\n[put_note(body='x')]", '\n{"name": "put_note", "parameters": {}}', "\n  ",
    ]  # fmt: skip
    return markers + bodies + list("{}[](),:;=\"'<>|\\ \n1-") + ["word ", "é", "\\n", "```\n"]


@pytest.mark.parametrize("family", [*TOOL_FORMATS, "harmony"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_salad_of_markers_reads_the_same_whatever_the_cuts(
    family: str, data: st.DataObject
) -> None:
    parts = st.lists(st.sampled_from(fragments(family)), max_size=20)
    text = "".join(data.draw(parts))
    tools = TOOLS if data.draw(st.booleans()) else ()
    thinking = data.draw(st.booleans())
    whole = read(family, text, tools, thinking=thinking)
    pieces = data.draw(cuts)
    assert read(family, text, tools, thinking=thinking, cuts=pieces) == whole
    single = separate(machine_for(family, tools, thinking=thinking), list(text))
    assert single.as_json() == whole.as_json()


@pytest.mark.parametrize("family", [*TOOL_FORMATS, "harmony"])
@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=200), thinking=st.booleans())
def test_any_text_at_all_is_taken_without_an_exception(
    family: str, text: str, thinking: bool
) -> None:
    outcome = read(family, text, TOOLS, thinking=thinking)
    assert len(outcome.content) + len(outcome.reasoning) <= len(text)


def test_every_format_that_writes_markers_has_a_writer() -> None:
    marked: list[Any] = [name for name, each in TOOL_FORMATS.items() if each.openers]
    assert sorted(marked) == sorted(WRITERS)
