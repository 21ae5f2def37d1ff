"""A responses body becomes a request or a fault that names its field, whatever is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osaurus.errors import UserError
from osaurus.server.apis.responses_request import PreparedResponse, prepare_response
from osaurus.server.apis.responses_store import ResponseStore
from osaurus.server.apis.responses_wire import ResponsesBody, encode
from osaurus.server.body import decode_json
from osaurus.types.response_format import JsonSchemaFormat
from responses_oracle import check_response

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}

_WORDS = st.sampled_from(
    ["auto", "none", "required", "function", "allowed_tools", "f", "low", "json_schema", "x", ""]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 30) | st.floats(-2, 2) | _WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "name", "tools", "mode", "function", "format", "schema", "effort", "k"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def _prepared(**fields: Any) -> PreparedResponse:
    body = json.dumps({"model": "m", "input": "?", **fields}).encode()
    return prepare_response(decode_json(body, ResponsesBody), ResponseStore(), "req_1")


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(ResponsesBody.__struct_fields__), _JSON, max_size=4))
def test_no_body_is_worse_than_a_named_fault(fields: dict[str, Any]) -> None:
    try:
        prepared = _prepared(**fields)
    except UserError:
        return
    json.loads(encode(prepared.response))


def test_what_a_request_left_out_is_said_by_its_default() -> None:
    response = json.loads(encode(_prepared().response))
    check_response(response)
    assert (response["tool_choice"], response["truncation"], response["store"]) == (
        "auto",
        "disabled",
        True,
    )


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        {"type": "function", "name": "f"},
        {"type": "function", "function": {"name": "f"}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
    ],
)
def test_a_choice_of_tools_is_said_back_in_the_published_form(choice: Any) -> None:
    response = json.loads(encode(_prepared(tools=[FUNCTION], tool_choice=choice).response))
    check_response(response)


def test_a_function_may_be_wrapped_as_in_chat_completions() -> None:
    wrapped = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    flat, inner = _prepared(tools=[FUNCTION]), _prepared(tools=[wrapped])
    assert flat.chat_request.tools == inner.chat_request.tools


def test_a_shape_is_the_same_as_chat_completions_and_said_back_flat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    given_format = {"type": "json_schema", "name": "n", "schema": schema}
    prepared = _prepared(text={"format": given_format})
    wanted = prepared.chat_request.response_format
    assert isinstance(wanted, JsonSchemaFormat)
    assert (wanted.schema, wanted.where) == (schema, "text.format.schema")
    response = json.loads(encode(prepared.response))
    check_response(response)
    assert response["text"]["format"]["schema"] == schema
