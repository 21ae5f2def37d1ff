"""Claims with the real default model, which knows nothing of schemas or tools: what it writes
under a grammar fits, whatever it would rather say. Cases F09, F11, F29 and F41."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import jsonschema_rs
import openai
import pytest

from api.random_schemas import random_schema
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

FOUR: list[Any] = [{"role": "user", "content": "What is two plus two?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = EngineConfig(max_batch_size=8, kv_budget_bytes=256 << 20)
    source = BundleSource(LoadOptions(device="cpu", engine=engine, disk_cache=False))
    with running_server(source, ServerConfig(port=0, preload="default")) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=500) as client:
        yield client


def _ask(client: openai.OpenAI, **fields: Any) -> Any:
    settings = {"model": "default", "messages": FOUR, "temperature": 0, "max_tokens": 60}
    return client.chat.completions.create(**{**settings, **fields}).choices[0]


def _format(schema: Any) -> Any:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def test_two_hundred_schemas_are_kept_to(client: openai.OpenAI) -> None:
    def fill(seed: int) -> tuple[str, str]:
        choice = _ask(
            client,
            messages=[{"role": "user", "content": f"Describe thing number {seed} as JSON."}],
            response_format=_format(random_schema(seed)),
            temperature=(0, 0.8, 1.5)[seed % 3],
            seed=seed,
            max_tokens=80,
        )
        return choice.finish_reason, choice.message.content or ""

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(fill, range(200)))
    finished = 0
    for seed, (reason, text) in enumerate(answers):
        assert reason in ("stop", "length"), seed
        if reason == "length":
            continue
        finished += 1
        schema = random_schema(seed)
        found = list(jsonschema_rs.validator_for(schema).iter_errors(json.loads(text)))
        assert not found, (seed, schema, text, found[0].message)
    assert finished >= 150


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
GOOD = {
    "tree": TREE,
    "items": {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
            "b": {"$ref": "#/properties/a/items"},
        },
        "required": ["a", "b"],
    },
    "enum": {
        "$defs": {"e": {"enum": ["x", 'a "b"', None]}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/e"}},
        "required": ["a"],
    },
    "null": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("kind", GOOD)
def test_f41_good_schemas_are_kept_to_on_every_protocol(
    client: openai.OpenAI, url: str, kind: str
) -> None:
    schema = GOOD[kind]
    validator = jsonschema_rs.validator_for(schema)

    def chat(seed: int) -> tuple[bool, str]:
        choice = _ask(client, response_format=_format(schema), temperature=1.5, seed=seed)
        return choice.finish_reason == "stop", choice.message.content

    def ollama(seed: int) -> tuple[bool, str]:
        options = {"temperature": 1.5, "seed": seed, "num_predict": 60}
        body = {"model": "default", "messages": FOUR, "stream": False, "options": options}
        answer = httpx2.post(f"{url}/api/chat", json={**body, "format": schema}, timeout=300).json()
        return answer["done_reason"] == "stop", answer["message"]["content"]

    def responses(seed: int) -> tuple[bool, str]:
        flat: Any = {"type": "json_schema", "name": "answer", "schema": schema}
        response = client.responses.create(
            model="default",
            input="Hi",
            temperature=1.5,
            max_output_tokens=60,
            text={"format": flat},
            extra_body={"seed": seed},
        )
        return response.status == "completed", response.output_text

    for ask in (chat, ollama, responses):
        finished = [text for is_whole, text in map(ask, range(6)) if is_whole]
        assert finished
        for text in finished:
            validator.validate(json.loads(text))


def test_f29_answers_with_and_without_a_schema_share_a_batch(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["a"],
        "additionalProperties": False,
    }
    free = [f"Write a sentence about the number {i}." for i in range(5)]

    def ask_free(i: int) -> str:
        messages = [{"role": "user", "content": free[i]}]
        return _ask(client, messages=messages, max_tokens=10 + 4 * i).message.content

    def ask_shaped(i: int) -> str:
        messages = [{"role": "user", "content": f"Give me a number, {i}."}]
        return _ask(client, messages=messages, response_format=_format(schema)).message.content

    alone = [ask_free(i) for i in range(5)]
    tasks = [(ask_free, i) for i in range(5)] + [(ask_shaped, i) for i in range(15)]
    random.Random(7).shuffle(tasks)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda task: task[0](task[1]), tasks))
    for (kind, i), answer in zip(tasks, answers, strict=True):
        if kind is ask_free:
            assert answer == alone[i]
        else:
            jsonschema_rs.validator_for(schema).validate(json.loads(answer))


def _tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    _tool("get_weather", city={"type": "string", "maxLength": 12}),
    _tool("note", text={"type": "string", "maxLength": 12}),
]
NOTE = {"type": "function", "function": {"name": "note"}}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"get_weather", "note"}),
        ({"tool_choice": NOTE}, {"note"}),
    ],
)
def test_f11_a_call_that_is_required_is_made(
    client: openai.OpenAI, fields: dict[str, Any], names: set[str]
) -> None:
    for seed in range(3):
        settings = {"temperature": 1.0, "seed": seed, "tools": TOOLS, "max_tokens": 120, **fields}
        plain = _ask(client, **settings)
        assert plain.finish_reason == "tool_calls"
        (call,) = plain.message.tool_calls
        assert call.function.name in names
        tool = next(t for t in TOOLS if t["function"]["name"] == call.function.name)
        validator = jsonschema_rs.validator_for(tool["function"]["parameters"])
        validator.validate(json.loads(call.function.arguments))
        assert not plain.message.content
        chunks = list(
            client.chat.completions.create(model="default", messages=FOUR, stream=True, **settings)
        )
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        pieces = [p for c in chunks for p in c.choices[0].delta.tool_calls or ()]
        assert "".join(p.function.arguments or "" for p in pieces) == call.function.arguments


def test_f11_none_makes_no_call(client: openai.OpenAI) -> None:
    choice = _ask(client, tools=TOOLS, tool_choice="none", max_tokens=20)
    assert not choice.message.tool_calls
    assert "tool_call" not in choice.message.content


def test_f09_a_call_that_the_length_cuts_is_no_call(client: openai.OpenAI) -> None:
    long = [_tool("note", text={"type": "string", "minLength": 400})]
    settings = {"tools": long, "tool_choice": "required", "max_tokens": 12}
    plain = _ask(client, **settings)
    assert plain.finish_reason == "length"
    assert not plain.message.tool_calls
    assert not plain.message.content
    chunks = list(
        client.chat.completions.create(model="default", messages=FOUR, stream=True, **settings)
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert not "".join(c.choices[0].delta.content or "" for c in chunks)


def test_expressions_choices_and_grammars_are_kept_to(client: openai.OpenAI) -> None:
    kinds = {
        r"^\d{3}-[a-z]{2,4}$": {"guided_regex": r"\d{3}-[a-z]{2,4}"},
        r"^(yes|no|perhaps)$": {"guided_choice": ["yes", "no", "perhaps"]},
        r"^x=[0-9]{1,3};(y=[0-9]{1,3};)?$": {
            "guided_grammar": 'start: "x=" n ";" ("y=" n ";")?\nn: /[0-9]{1,3}/'
        },
    }
    for pattern, fields in kinds.items():
        for seed in range(4):
            choice = _ask(client, extra_body=fields, temperature=1.0, seed=seed, n=2)
            assert choice.finish_reason == "stop"
            assert re.match(pattern, choice.message.content), (pattern, choice.message.content)
