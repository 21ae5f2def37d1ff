"""Tool schemas for templates: a plain copy, the original untouched, plain ones unchanged."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osaurus.chat.arguments import ArgumentChecker
from osaurus.chat.schemas import plain_schema, tool_views
from osaurus.types.chat import Tool
from osaurus.types.events import ToolInvocation


def _property(schema: Any) -> Any:
    return plain_schema({"type": "object", "properties": {"p": schema}})["properties"]["p"]


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": ["string", "null"]}, {"type": "string", "nullable": True}),
        ({"type": ["integer", "string"]}, {"type": "integer"}),
        ({"type": "null"}, {"type": "string", "nullable": True}),
        ({"type": ["null"], "items": {}}, {
            "type": "array", "items": {"type": "string"}, "nullable": True}),
        ({"properties": {}}, {"type": "object", "properties": {}}),
        ({"items": {"type": "integer"}}, {"type": "array", "items": {"type": "integer"}}),
        ({"type": 5, "description": "d"}, {"type": "string", "description": "d"}),
        ({"type": ["string", "null"], "enum": ["a", None, "null"]},
         {"type": "string", "enum": ["a"], "nullable": True}),
        ({"type": "object", "additionalProperties": False}, {"type": "object"}),
        ({"type": "object", "additionalProperties": {"type": ["null", "number"]}},
         {"type": "object", "additionalProperties": {"type": "number", "nullable": True}}),
        (True, {"type": "string"}),
        (False, {"type": "string"}),
        ({}, {"type": "string"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "t"},
         {"type": "integer", "title": "t", "nullable": True}),
        ({"anyOf": [{"type": "integer"}, {"type": ["string", "null"]}]},
         {"type": "string", "anyOf": [
             {"type": "integer"}, {"type": "string", "nullable": True}]}),
        ({"type": "object", "properties": {"type": {"type": ["string", "null"]}, "enum": True}},
         {"type": "object", "properties": {
             "type": {"type": "string", "nullable": True}, "enum": {"type": "string"}}}),
    ],
)  # fmt: skip
def test_real_schemas_become_plain(schema: Any, plain: Any) -> None:
    assert _property(schema) == plain


def test_references_are_inlined_and_cycles_cut() -> None:
    schema = {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/Place", "description": "where"}},
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "near": {"$ref": "#/$defs/Place"}},
            }
        },
    }
    place = plain_schema(schema)["properties"]["place"]
    assert place["description"] == "where"
    assert place["properties"] == {"name": {"type": "string"}, "near": {"type": "object"}}
    assert "$defs" not in plain_schema(schema)


def test_references_that_multiply_a_schema_are_cut() -> None:
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for i in range(1, 40):
        both = {"$ref": f"#/$defs/d{i - 1}"}
        definitions[f"d{i}"] = {"type": "object", "properties": {"a": both, "b": both}}
    schema = {"$ref": "#/$defs/d39", "$defs": definitions}
    assert len(json.dumps(plain_schema(schema))) < 5_000_000


def test_a_tool_without_parameters_is_an_empty_object() -> None:
    (view,) = tool_views([Tool(name="now")])
    assert view["function"]["parameters"] == {"type": "object", "properties": {}}


plain_schemas = st.recursive(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "number", "boolean"])},
        optional={
            "description": st.text(),
            "enum": st.lists(st.integers()),
            "default": st.none() | st.text(),
        },
    ),
    lambda inner: (
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.text(), inner, max_size=3),
            },
            optional={"required": st.lists(st.text(), max_size=2), "description": st.text()},
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    ),
    max_leaves=8,
)


@given(plain_schemas)
def test_a_plain_schema_comes_out_byte_for_byte(schema: dict[str, Any]) -> None:
    assert json.dumps(plain_schema(schema)) == json.dumps(schema)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "$ref", "enum", "nullable", "$defs", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["type", "properties", "anyOf", "items"]), json_values))
def test_copying_is_idempotent_and_leaves_the_original_alone(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    once = plain_schema(schema)
    assert schema == before
    assert json.dumps(plain_schema(once)) == json.dumps(once)


def _faults(parameters: dict[str, Any], arguments: str) -> list[tuple[str, str]]:
    checker = ArgumentChecker([Tool(name="f", parameters=parameters)])
    call = ToolInvocation(name="f", arguments_json=arguments)
    return [(fault.path, fault.message) for fault in checker.faults(call)]


def test_the_original_schema_checks_arguments() -> None:
    schema = {
        "type": "object",
        "properties": {"a/b": {"type": ["integer", "null"]}},
        "required": ["a/b"],
        "additionalProperties": False,
    }
    assert _faults(schema, '{"a/b": null}') == []
    assert [path for path, _ in _faults(schema, '{"a/b": "x"}')] == ["/a~1b"]
    assert "required" in _faults(schema, "{}")[0][1]


@pytest.mark.parametrize(
    "schema", [{"type": "wizard"}, {"$ref": "http://example.invalid/s.json"}, {"pattern": "("}, {}]
)
def test_a_schema_that_cannot_be_compiled_checks_nothing(schema: dict[str, Any]) -> None:
    assert _faults(schema, '{"x": 1}') == []
