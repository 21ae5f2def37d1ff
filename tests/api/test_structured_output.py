"""Claims over HTTP: a shape that cannot be enforced is a 400 that says where (F41), on every
protocol and for tools too; what can be goes to the engine as a grammar of the request's own."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
import pytest

from api.conftest import Running, Start
from api.scripted_engine import Say, ScriptedEngine, ScriptedSource
from osaurus.parsing.selection import FormatChoice
from osaurus.runtime.conventions import Conventions

ASK = [{"role": "user", "content": "hi"}]


def in_object(argument: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": argument},
        "required": ["a"],
        "additionalProperties": False,
    }


BAD = {
    "lookahead": ({"type": "string", "pattern": "(?=a)b"}, "#/properties/a/pattern"),
    "no expression": ({"type": "string", "pattern": "(a"}, "#/properties/a/pattern"),
    "reference to nowhere": ({"$ref": "#/$defs/none"}, "#/properties/a/$ref"),
    "endless": ({"$ref": "#"}, "#/properties/a/$ref"),
    "items": ({"type": "array", "minItems": 3, "maxItems": 2}, "#/properties/a/minItems"),
    "type": ({"type": "wizard"}, "#/properties/a/type"),
    "oneOf": (
        {"oneOf": [{"type": "object", "properties": {"b": {}}}, {"type": "object"}]},
        "#/properties/a",
    ),
}
TREE = {
    "$defs": {
        "node": in_object({"type": "array", "items": {"$ref": "#/$defs/node"}}),
    },
    "$ref": "#/$defs/node",
}
GOOD = [
    TREE,
    {"type": "object", "properties": {
        "a": {"type": "array", "items": {"type": "null"}}, "b": {"$ref": "#/properties/a/items"}}},
    {"$defs": {"e": {"enum": ["x", "y"]}}, **in_object({"$ref": "#/$defs/e"})},
    in_object({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]  # fmt: skip


def _post(url: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}{path}", json={"model": "m", **body}, timeout=30)


def _chat(url: str, **fields: Any) -> httpx2.Response:
    return _post(url, "/v1/chat/completions", messages=ASK, **fields)


def _schema(schema: Any, **fields: Any) -> dict[str, Any]:
    wrapped = {"name": "answer", "schema": schema, "strict": True, **fields}
    return {"type": "json_schema", "json_schema": wrapped}


def _tool(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}


@pytest.mark.parametrize("kind", BAD)
def test_f41_a_bad_schema_is_refused_on_every_protocol(running: Running, kind: str) -> None:
    argument, place = BAD[kind]
    schema = in_object(argument)
    flat = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    answers = {
        "response_format.json_schema.schema": _chat(running.url, response_format=_schema(schema)),
        "guided_json": _chat(running.url, guided_json=schema),
        "structured_outputs.json": _chat(running.url, structured_outputs={"json": schema}),
        "text.format.schema": _post(
            running.url, "/v1/responses", input="hi", text={"format": flat}
        ),
        "format": _post(running.url, "/api/chat", messages=ASK, format=schema, stream=False),
    }
    for field, answer in answers.items():
        assert answer.status_code == 400, (field, answer.text)
        assert f"{field}: {place}" in answer.text.replace("\\", ""), answer.text
    streamed = _chat(running.url, response_format=_schema(schema), stream=True)
    assert (streamed.status_code == 400) or place in streamed.text
    assert running.engine.requests == []


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "oneOf"])
def test_f41_a_bad_schema_of_a_strict_tool_is_refused(running: Running, kind: str) -> None:
    argument, place = BAD[kind]
    answer = _chat(running.url, tools=[_tool(in_object(argument), strict=True)])
    assert answer.status_code == 400
    assert f"tools.f.parameters: {place}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("schema", GOOD)
def test_f41_good_schemas_reach_the_engine_as_a_grammar(running: Running, schema: Any) -> None:
    assert _chat(running.url, response_format=_schema(schema)).status_code == 200
    (request,) = running.engine.requests
    assert request.make_constraint is not None
    first, second = request.make_constraint(), request.make_constraint()
    assert first is not None
    assert first is not second, "each choice has its own"
    assert first.masks(()).any()


def test_f41_a_huge_schema_is_answered_in_time(running: Running) -> None:
    inner: dict[str, Any] = {"type": "string"}
    for level in range(20):
        names = {f"p{level}_{i}": {"type": "string"} for i in range(199)}
        inner = {"type": "object", "properties": {**names, "child": inner}}
    begin = time.monotonic()
    answer = _chat(running.url, response_format=_schema(inner))
    assert time.monotonic() - begin < 5
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert "response_format" in answer.text


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": _schema(3)}, "response_format.json_schema.schema"),
        ({"response_format": _schema({}, name="a b")}, "response_format.json_schema.name"),
        ({"response_format": _schema({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 3]}, "guided_choice[1]"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json_object": "x"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"wizard": 1}}, "structured_outputs.wizard"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_a_malformed_shape_is_a_400_that_names_its_field(
    running: Running, fields: dict[str, Any], where: str
) -> None:
    answer = _chat(running.url, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == where
    assert running.engine.requests == []


@pytest.mark.parametrize(
    ("fields", "text", "not_text"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a":', "[1"),
        ({"guided_json": in_object({"type": "integer"})}, '{"a":12}', '{"b"'),
        ({"guided_json": '{"type": "integer"}'}, "12", '"'),
        ({"guided_regex": r"\d{2}/x"}, "12/x", "1/x"),
        ({"guided_choice": ["yes", "<|im_end|>"]}, "<|im_", "no"),
        ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, "a1", "b"),
        ({"structured_outputs": {"json_object": True}}, "{}", "3"),
        ({"structured_outputs": {"choice": ["a", "ab"], "backend": "auto"}}, "ab", "b"),
    ],
)
def test_each_kind_of_shape_becomes_its_grammar(
    running: Running, fields: dict[str, Any], text: str, not_text: str
) -> None:
    assert _chat(running.url, **fields).status_code == 200
    make = running.engine.requests[0].make_constraint
    assert make is not None
    for written, fits in ((text, True), (not_text, False)):
        found: Any = make()
        masks = found.masks(list(written.encode()))
        allowed = [
            bool((int(masks[i][byte >> 5]) >> (byte & 31)) & 1)
            for i, byte in enumerate(written.encode())
        ]
        assert all(allowed) is fits, written


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_free_text_has_no_grammar(running: Running, value: Any) -> None:
    assert _chat(running.url, response_format=value).status_code == 200
    assert running.engine.requests[0].make_constraint is None


def test_legacy_completions_take_shapes_too(running: Running) -> None:
    answer = _post(running.url, "/v1/completions", prompt="x", guided_regex="[0-9]{3}")
    assert answer.status_code == 200
    assert running.engine.requests[0].make_constraint is not None


def _thinking_server(start: Start, text: str, tool_format: str | None = None) -> Running:
    formats = FormatChoice(
        tool_format=tool_format, tool_origin="test", reasoning="think", reasoning_origin="test"
    )
    source = ScriptedSource(
        {"m": ScriptedEngine(lambda request, index: [Say(text)])},
        conventions={"m": Conventions(formats=formats)},
    )
    return start(source=source)


def test_markers_in_the_answer_are_data_and_thinking_is_apart(start: Start) -> None:
    data = json.dumps({"a": "</think><tool_call>{} <think>"})
    running = _thinking_server(start, f"<think>hm</think>\n\n{data}", "json")
    answer = _chat(running.url, response_format=_schema(in_object({"type": "string"})))
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == data
    assert message["reasoning_content"] == "hm"


def test_tools_and_a_shape_go_together_or_are_refused(start: Start) -> None:
    fields = {"tools": [_tool({})], "response_format": {"type": "json_object"}}
    running = _thinking_server(
        start, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "json"
    )
    answer = _chat(running.url, **fields)
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    make = running.engine.requests[0].make_constraint
    assert make is not None
    for text in ("<tool_call>\n", '{"x"', "<think>so</think>\n{}"):
        found: Any = make()
        for byte in text.encode():
            found.commit(byte)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_required_call_is_a_grammar_and_a_free_choice_is_none(start: Start, choice: Any) -> None:
    running = _thinking_server(
        start, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "json"
    )
    assert _chat(running.url, tools=[_tool({})], tool_choice=choice).status_code == 200
    assert _chat(running.url, tools=[_tool({})]).status_code == 200
    first, second = running.engine.requests
    assert first.make_constraint is not None
    assert second.make_constraint is None
    found: Any = first.make_constraint()
    for byte in b'<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>':
        found.commit(byte)
    assert found.is_accepting


def test_an_answer_that_the_client_has_begun_goes_on_in_its_shape(running: Running) -> None:
    shape = _schema(in_object({"type": "integer"}))
    begun = [*ASK, {"role": "assistant", "content": '{"a":'}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = _post(
        running.url, "/v1/chat/completions", messages=begun, response_format=shape, **fields
    )
    assert answer.status_code == 200, answer.text
    make = running.engine.requests[0].make_constraint
    assert make is not None
    found: Any = make()
    for byte in b" 12}":
        found.commit(byte)
    assert found.is_finished
    wrong = [*ASK, {"role": "assistant", "content": "Sure: "}]
    answer = _post(
        running.url, "/v1/chat/completions", messages=wrong, response_format=shape, **fields
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_a_schema_that_says_a_key_twice_is_refused_by_its_place(start: Start) -> None:
    running = start()
    schema = '{"type":"object","properties":{"a":{"type":"string"},"a":{"type":"integer"}}}'
    hi = '"model":"m","messages":[{"role":"user","content":"hi"}]'
    bodies = {
        "/v1/chat/completions": f'{{{hi},"response_format":{{"type":"json_schema",'
        f'"json_schema":{{"name":"n","schema":{schema}}}}}}}',
        "/v1/responses": '{"model":"m","input":"hi","text":{"format":{"type":"json_schema",'
        f'"name":"n","schema":{schema}}}}}}}',
        "/v1/messages": f'{{{hi},"max_tokens":9,"output_config":{{"format":'
        f'{{"type":"json_schema","schema":{schema}}}}}}}',
        "/api/chat": f'{{{hi},"format":{schema}}}',
    }
    for path, body in bodies.items():
        answer = httpx2.post(f"{running.url}{path}", content=body.encode())
        assert answer.status_code == 400, path
        assert "properties.a: stands there twice" in answer.text, path
    # Elsewhere the last one holds, as in every other JSON reader.
    plain = '{"model":"absent","model":"m","messages":[{"role":"user","content":"hi"}]}'
    answer = httpx2.post(f"{running.url}/v1/chat/completions", content=plain.encode())
    assert answer.status_code == 200
    assert running.engine.requests[0].make_constraint is None
