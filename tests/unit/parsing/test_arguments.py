"""Arguments: text to declared types, and validation that reports and touches nothing."""

from __future__ import annotations

from typing import Any

import pytest

from osaurus.parsing.arguments import (
    Toolset,
    admitted_types,
    argument_problems,
    restored,
    trim_edge_breaks,
    typed,
)
from osaurus.types.chat import Tool

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
BOOLEAN = {"type": "boolean"}
OBJECT = {"type": "object"}
ARRAY = {"type": "array"}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": [schema["type"], "null"]}


@pytest.mark.parametrize(
    ("text", "schema", "wanted"),
    [
        ("42", STRING, "42"),
        ("null", STRING, "null"),
        ('{"a": 1}', STRING, '{"a": 1}'),
        ("a\\nb &amp;", STRING, "a\\nb &amp;"),
        ("", STRING, ""),
        ("null", nullable(STRING), None),
        (" NULL ", nullable(STRING), None),
        ("07:30", nullable(STRING), "07:30"),
        ("07", INTEGER, 7),
        (" +5 ", INTEGER, 5),
        ("-0", INTEGER, 0),
        ("5.0", INTEGER, "5.0"),
        ("five", INTEGER, "five"),
        ("9" * 40, INTEGER, int("9" * 40)),
        ("12", NUMBER, 12),
        ("12.50", NUMBER, 12.5),
        ("1e3", NUMBER, 1000.0),
        ("1e999", NUMBER, "1e999"),
        ("nan", NUMBER, "nan"),
        ("TRUE", BOOLEAN, True),
        ("1", BOOLEAN, True),
        ("0", BOOLEAN, False),
        ("yes", BOOLEAN, "yes"),
        ("{'a': True}", OBJECT, {"a": True}),
        ('{"a": true}', OBJECT, {"a": True}),
        ("[1]", OBJECT, "[1]"),
        ("(1, 2)", ARRAY, [1, 2]),
        ("[1, 2", ARRAY, "[1, 2"),
        ("42", {}, "42"),
        ("42", {"type": ["integer", "string"]}, 42),
        ("x", {"type": ["integer", "string"]}, "x"),
        ("42", {"anyOf": [INTEGER, {"type": "null"}]}, 42),
        ("null", {"anyOf": [INTEGER, {"type": "null"}]}, None),
        ("null", {"type": "integer", "nullable": True}, None),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("true", {"const": True}, True),
    ],
)
def test_text_becomes_the_first_admitted_type_it_fits(
    text: str, schema: dict[str, Any], wanted: Any
) -> None:
    value = typed(text, schema)
    assert value == wanted
    assert type(value) is type(wanted)


def test_local_references_are_followed_and_cycles_end() -> None:
    root = {
        "$defs": {"n": {"$ref": "#/$defs/m"}, "m": {"anyOf": [INTEGER, {"$ref": "#/$defs/n"}]}},
        "properties": {"a/b": {"type": "boolean"}},
    }
    assert admitted_types({"$ref": "#/$defs/n"}, root) == {"integer"}
    assert admitted_types({"$ref": "#/properties/a~1b"}, root) == {"boolean"}
    assert admitted_types({"$ref": "https://example.com/x"}, root) == frozenset()
    loop: dict[str, Any] = {}
    loop["anyOf"] = [loop] * 50
    assert admitted_types(loop) == frozenset()


@pytest.mark.parametrize(
    "schema",
    [None, True, 7, "string", [], {"type": 3}, {"type": [None, 4]}, {"anyOf": 5}, {"enum": "abc"},
     {"type": "nonsense"}, {"$ref": 9}, {"properties": []}],
)  # fmt: skip
def test_a_schema_of_any_shape_is_met_without_an_exception(schema: Any) -> None:
    assert typed("42", schema) == "42"
    tools = Toolset([Tool(name="f", parameters={"properties": {"a": schema}, "required": schema})])
    assert tools.from_text("f", "a", "42", "text") == "42"
    assert isinstance(tools.required("f"), tuple)
    tools.problems("f", {"a": 1})


def test_one_line_break_at_each_end_is_trimmed_and_no_more() -> None:
    assert trim_edge_breaks("\n\n  a\n\n") == "\n  a\n"
    assert trim_edge_breaks("\r\na\r\n") == "a"
    assert trim_edge_breaks("\n") == ""
    assert trim_edge_breaks("  a ") == "  a "


def test_undeclared_arguments_are_text_or_in_loose_formats_literals() -> None:
    tools = Toolset([Tool(name="f", parameters={"properties": {"s": STRING}})])
    assert tools.from_text("f", "x", "\n42\n", "text") == "42"
    assert tools.from_text("f", "x", " 42 ", "loose") == 42
    assert tools.from_text("f", "x", "[1, 'a']", "loose") == [1, "a"]
    assert tools.from_text("f", "x", "a b", "loose") == "a b"
    assert tools.from_text("f", "s", " 42 ", "loose") == "42"


def test_strings_are_restored_where_the_schema_excludes_strings() -> None:
    schema = {
        "properties": {
            "n": INTEGER,
            "s": STRING,
            "o": {"type": "object", "properties": {"b": BOOLEAN}},
            "l": {"type": "array", "items": NUMBER},
        }
    }
    given = {"n": "5", "s": "5", "o": {"b": "true", "c": "1"}, "l": ["1", "x"], "z": "9"}
    assert restored(given, schema, schema) == {
        "n": 5,
        "s": "5",
        "o": {"b": True, "c": "1"},
        "l": [1, "x"],
        "z": "9",
    }


def test_names_are_found_by_case_and_by_nothing_else() -> None:
    tools = Toolset([Tool(name="Get_Weather"), Tool(name="get_weather"), Tool(name="Other")])
    assert tools.resolve("get_weather") == "get_weather"
    assert tools.resolve("Get_Weather") == "Get_Weather"
    assert tools.resolve("GET_WEATHER") == "Get_Weather"
    assert tools.resolve("OTHER") == "Other"
    assert tools.resolve("get-weather") is None
    assert tools.resolve("get_weathe") is None


def test_problems_name_the_place_and_the_rule() -> None:
    schema = {
        "type": "object",
        "properties": {"a": INTEGER, "l": {"type": "array", "items": STRING}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = Tool(name="f", parameters=schema)
    assert argument_problems(tool, {"a": 1, "l": ["x"]}) == ()
    assert argument_problems(tool, {"a": 10**40}) == ()
    problems = argument_problems(tool, {"a": "1", "l": ["x", 2], "z": 0})
    assert {(each.pointer, each.keyword) for each in problems} == {
        ("/a", "type"),
        ("/l/1", "type"),
        ("", "additionalProperties"),
    }
    assert argument_problems(tool, {})[0].keyword == "required"


def test_validation_changes_nothing_and_true_is_not_one() -> None:
    tool = Tool(name="f", parameters={"properties": {"a": INTEGER, "b": BOOLEAN}})
    given = {"a": True, "b": 1}
    assert len(argument_problems(tool, given)) == 2
    assert given == {"a": True, "b": 1}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"type": "nonsense"},
        {"properties": {"a": {"pattern": "("}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
    ],
)
def test_a_schema_that_cannot_be_used_checks_nothing_and_fetches_nothing(
    schema: dict[str, Any],
) -> None:
    assert argument_problems(Tool(name="f", parameters=schema), {"a": 1}) == ()


def test_a_pattern_cannot_stall_the_check() -> None:
    tool = Tool(name="f", parameters={"properties": {"a": {"pattern": "^(a+)+$"}}})
    argument_problems(tool, {"a": "a" * 5000 + "!"})
