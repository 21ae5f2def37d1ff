"""Claims: a schema that cannot be enforced is refused by its place, before anything is
generated; one that can be is enforced in a form that the schema itself accepts."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osaurus.grammar.schema import (
    ANNOTATIONS,
    KEYWORDS,
    MAX_NODES,
    checked_schema,
    expression_problem,
    part_of,
)
from osaurus.grammar.schema_walk import SchemaProblem


def in_object(argument: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": argument},
        "required": ["a"],
        "additionalProperties": False,
    }


def _refusal(schema: Any) -> SchemaProblem:
    with pytest.raises(SchemaProblem) as caught:
        checked_schema(schema)
    return caught.value


@pytest.mark.parametrize(
    ("argument", "place", "words"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "#/properties/a/pattern", "look-ahead"),
        ({"type": "string", "pattern": "(a"}, "#/properties/a/pattern", "unclosed group"),
        ({"type": "string", "pattern": r"\bfoo"}, "#/properties/a/pattern", "lookarounds"),
        ({"$ref": "#/$defs/none"}, "#/properties/a/$ref", "names no schema"),
        ({"$ref": "https://x.test/y"}, "#/properties/a/$ref", "names no schema"),
        ({"$ref": "#"}, "#/properties/a/$ref", "no way to end"),
        ({"$ref": None}, "#/properties/a/$ref", "names no schema"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "#/properties/a/minItems", "more than"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "#/properties/a/minLength", "3"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#/properties/a/minimum", "3"),
        ({"type": "strin"}, "#/properties/a/type", "'strin'"),
        ({"type": ["string", "string"]}, "#/properties/a/type", "twice"),
        ({"type": []}, "#/properties/a/type", "one or several"),
        ({"enum": []}, "#/properties/a/enum", "at least one"),
        ({"anyOf": []}, "#/properties/a/anyOf", "at least one"),
        ({"type": "array", "items": [{}]}, "#/properties/a/items", "prefixItems"),
        ({"type": "array", "uniqueItems": True}, "#/properties/a/uniqueItems", "not supported"),
        ({"not": {}}, "#/properties/a/not", "not supported"),
        ({"requird": []}, "#/properties/a/requird", "not supported"),
        ({"type": "string", "format": "wat"}, "#/properties/a/format", "'wat'"),
        ({"type": "object", "minProperties": 2}, "#/properties/a/minProperties", "required"),
        ({"properties": []}, "#/properties/a/properties", "object of schemas"),
        ({"type": "string", "minLength": -1}, "#/properties/a/minLength", "at least 0"),
        ({"multipleOf": 0}, "#/properties/a/multipleOf", "greater than 0"),
        (3, "#/properties/a", "must be a schema"),
        (False, "#", "no value"),
        ({"properties": {"x/y~": {"type": "?"}}}, "#/properties/a/properties/x~1y~0/type", "'?'"),
    ],
)
def test_f41_a_fault_is_named_by_its_place(argument: Any, place: str, words: str) -> None:
    problem = _refusal(in_object(argument))
    assert problem.pointer == place
    assert words in problem.words


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, "#/$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
         "#/$defs/b/$ref"),
        (in_object({"type": "object", "required": ["n"],
                    "properties": {"n": {"$ref": "#/properties/a"}}}),
         "#/properties/a/properties/n/$ref"),
        ({"type": "object", "properties": {"never": {"$ref": "#/$defs/a"}},
          "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}},
         "#/$defs/a/items/$ref"),
        (False, "#"),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, "#"),
    ],
)  # fmt: skip
def test_what_has_no_finite_value_is_refused(schema: Any, place: str) -> None:
    assert _refusal(schema).pointer == place


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
GOOD = [
    TREE,
    {"type": "object", "properties": {
        "a": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "null"}}}},
        "b": {"$ref": "#/properties/a/items"}}},
    {"$defs": {"e": {"enum": ["x", 1, None]}}, **in_object({"$ref": "#/$defs/e"})},
    in_object({"anyOf": [{"type": "string"}, {"type": "null"}]}),
    {"type": ["object", "null"], "title": "T", "description": "d", "x-order": 3, "default": None},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://x.test/a"},
    True,
    {},
]  # fmt: skip


@pytest.mark.parametrize("schema", GOOD)
def test_f41_good_schemas_pass(schema: Any) -> None:
    checked_schema(schema)


def nested(width: int, depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        properties = {f"p{level}_{i}": {"type": "string"} for i in range(width - 1)}
        properties["child"] = inner
        inner = {"type": "object", "properties": properties, "required": list(properties)}
    return json.loads(json.dumps(inner))


def test_f41_twenty_objects_of_two_hundred_names_are_checked_at_once() -> None:
    begin = time.monotonic()
    checked_schema(nested(200, 20))
    assert time.monotonic() - begin < 2


def test_size_and_depth_have_limits() -> None:
    deep: Any = {"type": "string"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    assert "nested" in _refusal(deep).words
    many = {"type": "object", "properties": {f"p{i}": {} for i in range(MAX_NODES + 1)}}
    assert str(MAX_NODES) in _refusal(many).words


def test_a_lenient_check_leaves_out_what_cannot_be_enforced_and_nothing_else() -> None:
    argument = {
        "type": "array",
        "uniqueItems": True,
        "items": {"type": "string", "pattern": "(?=a)", "format": "int32", "minLength": 2},
    }
    got = checked_schema(in_object(argument), lenient=True)
    assert isinstance(got, dict)
    assert got["properties"]["a"] == {"type": "array", "items": {"type": "string", "minLength": 2}}
    for fault in ({"type": "strin"}, {"$ref": "#/none"}):
        with pytest.raises(SchemaProblem):
            checked_schema(in_object(fault), lenient=True)


def test_objects_that_list_their_names_are_closed_where_that_keeps_every_answer_valid() -> None:
    listed = {"type": "object", "properties": {"a": {}}}
    assert checked_schema(listed)["additionalProperties"] is False  # type: ignore[index]
    assert "additionalProperties" not in listed, "the given schema is left alone"
    for schema in (
        {"type": "object"},
        {**listed, "additionalProperties": {"type": "integer"}},
        {**listed, "required": ["b"]},
        {"allOf": [listed, {"properties": {"b": {}}}]},
        {**listed, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
    ):
        assert checked_schema(schema) == schema


def test_a_part_keeps_its_references() -> None:
    root = {
        "type": "object",
        "$defs": {"n": {"type": "integer"}},
        "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
        "required": ["a"],
    }
    validator = jsonschema_rs.validator_for(part_of(root, "properties", "a"))
    assert validator.is_valid([1, 2])
    assert not validator.is_valid(["x"])


def test_expressions_say_why_they_cannot_be_enforced() -> None:
    assert expression_problem(r"[a-z]+\d{2}") is None
    assert "backreferences" in (expression_problem(r"(a)\1") or "")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([*KEYWORDS, *ANNOTATIONS, "a", "if", "$ref"]), inner, max_size=4
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_any_json_is_a_schema_or_refused_with_a_place(value: Any) -> None:
    for lenient in (False, True):
        problem: SchemaProblem | None = None
        try:
            checked_schema(value, lenient=lenient)
        except SchemaProblem as caught:
            problem = caught
        assert problem is None or (problem.pointer.startswith("#") and problem.words)
