"""The value readers: strict, linear, without recursion, the same whatever the cuts."""

from __future__ import annotations

import ast
import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osaurus.parsing.gemma_values import Delimited
from osaurus.parsing.python_values import PYTHON, parse_python
from osaurus.parsing.source import Cut, Malformed, Source
from osaurus.parsing.values import JSON, MAX_DEPTH, Syntax, parse_json, read_value

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip


def read_in_pieces(syntax: Syntax, pieces: list[str]) -> tuple[Any, str]:
    """The value, and what was left unread."""
    source = Source()
    reader = read_value(source, syntax)
    for piece in pieces:
        source.feed(piece)
        try:
            next(reader)
        except StopIteration as done:
            return done.value, source.text[source.pos :]
    source.ended = True
    with pytest.raises(Cut):
        next(reader)
    return Cut, ""


@given(value=values)
def test_json_reads_back_what_the_standard_library_wrote(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert json.dumps(parse_json(text)) == json.dumps(value)


@given(value=values)
def test_json_in_single_characters_ends_exactly_behind_the_value(value: Any) -> None:
    text = json.dumps([value])
    got, _ = read_in_pieces(JSON, list(text))
    assert json.dumps(got) == json.dumps([value])
    assert read_in_pieces(JSON, [text + "</tool_call>"]) == (got, "</tool_call>")


@given(value=values)
def test_python_literals_read_back_what_repr_wrote(value: Any) -> None:
    assert json.dumps(parse_python(repr(value))) == json.dumps(value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1", '"a', "[1,]", '{"a":1,}', "{'a': 1}", "NaN", "Infinity", "-Infinity", "1e999",
     "01", "1.", ".5", "+1", "tru", "True", '"\\x"', '"\\ud800"', '{"a" 1}', '{"a":1} 2', "[1 2]",
     "{1: 2}", "]", "1" * 5000],
)  # fmt: skip
def test_what_is_not_json_is_malformed_and_never_repaired(text: str) -> None:
    with pytest.raises(Malformed):
        parse_json(text)


def test_json_details_that_models_need() -> None:
    assert parse_json('"raw\nbreak\tand tab"') == "raw\nbreak\tand tab"
    assert parse_json('"\\ud83d\\ude00"') == "😀"
    assert parse_json("123456789012345678901234567890") == 123456789012345678901234567890
    assert math.copysign(1, parse_json("-0.0")) == -1
    assert parse_json("1e3") == 1000.0
    assert list(parse_json('{"b": 1, "a": 2, "b": 3}').items()) == [("b", 3), ("a", 2)]
    with pytest.raises(Malformed):
        parse_json('{"b": 1, "b": 3}', unique=True)
    with pytest.raises(Malformed):
        parse_json('{"o": {"b": 1, "b": 3}}', unique=True)


@pytest.mark.parametrize(
    "text",
    ["'it\\'s'", '"a\\"b"', "'a\\nb'", "'\\x41\\u00e9\\U0001F600'", "'\\101'", "'''a'b'''",
     '"""a"b"""', "''", "-12.5", "+3", "0x1F", "0b101", "1_000", "1e-3", "[1, 2,]", "()", "(1,)",
     "(1)", "{'a': [1, (2, 'x')]}", "{}", "None", "True", "'a\\\nb'"],
)  # fmt: skip
def test_python_literals_mean_what_python_says(text: str) -> None:
    wanted = ast.literal_eval(text)
    assert json.dumps(parse_python(text)) == json.dumps(wanted)


def test_python_details_beyond_the_language() -> None:
    assert parse_python("[true, false, null]") == [True, False, None]
    assert parse_python("{1, 2}") == [1, 2]
    assert parse_python("'\\q'") == "\\q"
    assert parse_python("'raw\nbreak'") == "raw\nbreak"
    assert parse_python("{1: 'a', None: 'b'}") == {"1": "a", "null": "b"}


@pytest.mark.parametrize(
    "text",
    ["x", "f()", "1-2", "1+2j", "a.b", "[i for i in x]", "**a", "f'x'", "b'x'", "'a' 'b'", "[1",
     "{1: }", "lambda: 0", "'\\ud800'", "nan", "inf", "1e999", "{[1]: 2}"],
)  # fmt: skip
def test_what_is_no_literal_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        parse_python(text)


GEMMA = Delimited('<|"|>', "<tool_call|>")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{a:<|"|>x, {y}<|"|>,b:-0.5,c:null}', {"a": "x, {y}", "b": -0.5, "c": None}),
        ('{a:{b:[1,<|"|>z<|"|>]}}', {"a": {"b": [1, "z"]}}),
        ('{a:bare words,b:2026-01-02}', {"a": "bare words", "b": "2026-01-02"}),
        ('{"a":"q\\"",<|"|>b c<|"|>:1}', {"a": 'q"', "b c": 1}),
        ('{a:<|"|><tool_call|> is data<|"|>}', {"a": "<tool_call|> is data"}),
        ("{}", {}),
    ],
)  # fmt: skip
def test_gemma_values_nest_and_strings_hold_anything(text: str, wanted: Any) -> None:
    assert read_in_pieces(GEMMA, [text + "<"]) == (wanted, "<")
    assert read_in_pieces(GEMMA, list(text))[0] == wanted


@pytest.mark.parametrize("text", ["{a:1<tool_call|>", "{a:}", "{:1}", "{a<tool_call|>", "{a,b}"])
def test_a_gemma_value_that_its_envelope_cuts_is_malformed(text: str) -> None:
    with pytest.raises(Malformed):
        read_in_pieces(GEMMA, [text + " "])


@pytest.mark.parametrize("opener", ["[", '{"a":', "(", "{'a':"])
@pytest.mark.parametrize("syntax", [JSON, PYTHON, GEMMA], ids=["json", "python", "gemma"])
def test_a_hundred_thousand_open_brackets_are_refused_at_once(opener: str, syntax: Syntax) -> None:
    source = Source()
    source.feed(opener * 100_000)
    source.ended = True
    start = time.perf_counter()
    with pytest.raises((Malformed, Cut)):
        next(read_value(source, syntax))
    assert time.perf_counter() - start < 0.5


def test_the_deepest_value_allowed_can_still_be_written() -> None:
    text = "[" * MAX_DEPTH + "[]" + "]" * MAX_DEPTH
    assert json.dumps(parse_json(text)) == text
    with pytest.raises(Malformed):
        parse_json(f"[{text}]")


def test_a_long_string_in_single_characters_costs_linear_time() -> None:
    source = Source()
    reader = read_value(source, JSON)
    start = time.perf_counter()
    for char in '"' + "x" * 200_000:
        source.feed(char)
        next(reader)
    assert time.perf_counter() - start < 5.0
