"""Whatever a client sends wrong is a 4xx that names the field and the limit; the server goes on."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from api.conftest import Running, Start
from api.scripted_engine import Hold, Say, ScriptedSource
from osaurus.errors import UnsupportedBundle
from osaurus.server.serve import ServerConfig

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def post(running: Running) -> Iterator[Callable[..., httpx2.Response]]:
    """Posts a body; afterwards the server must still answer a good request."""

    def send(body: object, **options: Any) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(f"{running.url}/v1/chat/completions", content=content, **options)

    yield send
    answer = running.client().chat.completions.create(model="m", messages=HI)
    assert answer.choices[0].message.content == "Hello!"


def _error(response: httpx2.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "must be an array, got null"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "must be an array, got a string"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'wizard'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content", "string"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "required"),
        ({"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": "absent"}]},
         "messages[1].tool_call_id", "'absent' is not there"),
        ({"messages": [{"role": "user", "content": [{"type": "magic"}]}]},
         "messages[0].content[0].type", "magic"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]},
         "messages[0].content", "text only, got image"),
        ({"model": 5}, "model", "must be a string"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_tokens": -5}, "max_tokens", "at least 1, got -5"),
        ({"max_tokens": 1.5}, "max_tokens", "whole number"),
        ({"max_tokens": "many"}, "max_tokens", "whole number, got str"),
        ({"max_tokens": 10**400}, "max_tokens", "at most"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
        ({"temperature": -0.1}, "temperature", "at least 0 and at most 2, got -0.1"),
        ({"temperature": 2.5}, "temperature", "at most 2"),
        ({"temperature": "hot"}, "temperature", "a number, got str"),
        ({"temperature": True}, "temperature", "a number, got bool"),
        ({"top_p": 1.5}, "top_p", "at most 1"),
        ({"min_p": -1}, "min_p", "at least 0"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "at most 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "at least -2"),
        ({"presence_penalty": 3}, "presence_penalty", "at most 2"),
        ({"repetition_penalty": -1}, "repetition_penalty", "at least 0"),
        ({"n": 0}, "n", "at least 1 and at most 32, got 0"),
        ({"n": 1000}, "n", "at most 32"),
        ({"stop": 5}, "stop", "must be a string or an array"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 strings, got 17"),
        ({"stop": ["x" * 5000]}, "stop[0]", "at most 4096"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"seed": 2**70}, "seed", "at most"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "at most 100"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "token ids"),
        ({"tools": [{"type": "web"}]}, "tools[0]", "function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]},
         "tools[0].function.name", "empty"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "empty"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0]", "name and parameters"),
        ({"thinking": {"type": "loud"}}, "thinking.type", "one of enabled, disabled"),
        ({"thinking": "loud"}, "thinking", "an object"),
        ({"thinking": {"budget_tokens": -1}}, "thinking.budget_tokens", "at least 0"),
        ({"thinking": {"budget_tokens": True}}, "thinking.budget_tokens", "a whole number"),
        ({"reasoning": "high"}, "reasoning", "an object"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort", "a string"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled", "true or false"),
        ({"think": 5}, "think", "true, false or an effort"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'sometimes'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "absent"}}},
         "tool_choice", "'absent'"),
        ({"tool_choice": {"type": "wizard"}}, "tool_choice", "must name its function"),
        ({"continue_final_message": True}, "continue_final_message", "assistant's message"),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "excludes"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "enable_thinking", "true or false"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"functions": []}, "functions", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "text"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "server"),
    ],
)  # fmt: skip
def test_a_bad_field_is_a_400_that_names_it_and_its_limit(
    post: Callable[..., httpx2.Response], fields: dict[str, Any], param: str, words: str
) -> None:
    response = post({"model": "m", "messages": HI, **fields})
    assert response.status_code == 400
    error = _error(response)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(post: Callable[..., httpx2.Response], missing: str) -> None:
    body: dict[str, Any] = {"model": "m", "messages": HI}
    del body[missing]
    response = post(body)
    assert (response.status_code, _error(response)["param"]) == (400, missing)
    assert "is required" in _error(response)["message"]


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('"temperature":NaN', "temperature"),
        ('"temperature":-Infinity', "temperature"),
        ('"logit_bias":{"5":Infinity}', "logit_bias.5"),
        ('"tools":[{"type":"function","x":[NaN]}]', "tools[0].x[0]"),
        ('"temperature":1e999', "temperature"),
    ],
)
def test_numbers_that_are_none_are_named(
    post: Callable[..., httpx2.Response], text: str, param: str
) -> None:
    response = post(f'{{"model":"m","messages":[],{text}}}'.encode())
    assert (response.status_code, _error(response)["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","model":',
        b"[" * 100_000,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'{"model":"m","messages":' + b"[" * 300 + b"]" * 300 + b"}",
    ],
    ids=range(14),
)
def test_a_body_that_is_no_good_json_is_a_400(
    post: Callable[..., httpx2.Response], body: bytes
) -> None:
    response = post(body)
    assert response.status_code == 400
    assert _error(response)["param"]


def test_deep_nesting_is_refused_with_the_limit(post: Callable[..., httpx2.Response]) -> None:
    response = post(b'{"model":"m","x":' + b"[" * 1000 + b"]" * 1000 + b"}")
    assert response.status_code == 400
    assert "256" in _error(response)["message"]


def test_brackets_inside_strings_are_no_nesting(post: Callable[..., httpx2.Response]) -> None:
    text = '"[[' * 500 + "{\\"
    assert post({"model": "m", "messages": [{"role": "user", "content": text}]}).status_code == 200


def test_fields_nobody_knows_are_ignored(post: Callable[..., httpx2.Response]) -> None:
    assert post({"model": "m", "messages": HI, "store": True, "x": [1]}).status_code == 200


def test_an_unknown_model_is_a_404_that_says_which_there_are(running: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        running.client().chat.completions.create(model="absent", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "'absent'" in caught.value.message
    assert "known: m" in caught.value.message


def test_a_prompt_beyond_the_context_is_a_400_with_both_numbers(start: Start) -> None:
    running = start(max_context_tokens=100)
    text = "x" * 500
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            running.client().chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": text}],
                stream=stream,
            )
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"
        num_tokens = 500 + len("?user\n?\n?assistant\n")  # ? stands for a control token
        assert f"{num_tokens} tokens > 100 maximum" in str(caught.value)
        assert text not in str(caught.value)


def test_a_template_that_refuses_is_a_400_with_its_words(start: Start) -> None:
    running = start()
    running.source.template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        running.client().chat.completions.create(model="m", messages=HI)


def test_a_model_that_cannot_load_is_refused_at_once_with_the_reason(start: Start) -> None:
    running = start(source=ScriptedSource({"bad": None, "m": None}))
    running.source.failures["bad"] = UnsupportedBundle("model_type 'x' is not supported")
    for _ in range(3):
        with pytest.raises(openai.BadRequestError, match="'x' is not supported"):
            running.client().chat.completions.create(model="bad", messages=HI)
    assert running.source.loads == ["bad"]
    health = httpx2.get(f"{running.url}/health")
    assert health.status_code == 200
    assert health.json()["load_errors"] == {"bad": "model_type 'x' is not supported"}


def test_a_body_of_100_mb_is_a_413_with_the_limit(running: Running) -> None:
    text = "x" * 100_000_000
    with pytest.raises(openai.APIStatusError) as caught:
        running.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}]
        )
    assert caught.value.status_code == 413
    assert "32 MiB" in caught.value.message
    assert caught.value.code == "payload_too_large"
    running.client().chat.completions.create(model="m", messages=HI)


def test_a_declared_length_beyond_the_limit_is_refused_before_the_body_comes(
    running: Running,
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", str(100_000_000))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_without_declared_length_is_cut_at_the_limit(start: Start) -> None:
    running = start(config=ServerConfig(port=0, max_body_bytes=100_000))

    def pieces() -> Iterator[bytes]:
        yield b'{"model":"m","x":"'
        for _ in range(200):
            yield b"x" * 1000

    response = httpx2.post(f"{running.url}/v1/chat/completions", content=pieces())
    assert response.status_code == 413
    assert _error(response)["code"] == "payload_too_large"


def test_too_many_headers_are_a_431(running: Running) -> None:
    headers = {f"x-{i}": "1" for i in range(201)}
    response = httpx2.get(f"{running.url}/health", headers=headers)
    assert response.status_code == 431
    assert "200" in _error(response)["message"]
    response = httpx2.get(f"{running.url}/health", headers={"x-big": "y" * 1_100_000})
    assert response.status_code == 431


def test_more_requests_than_may_wait_are_a_503_with_advice(start: Start) -> None:
    running = start(
        lambda request, index: [Hold("first"), Say("x")],
        config=ServerConfig(port=0, inference_limit=1),
    )
    client = running.client().chat.completions
    with ThreadPoolExecutor() as threads:
        first = threads.submit(lambda: client.create(model="m", messages=HI))
        running.engine.wait_until_held("first")
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the limit is 1") as caught:
                client.create(model="m", messages=HI, stream=stream)
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"] == "1"
        running.engine.open_gate("first")
        assert first.result().choices[0].message.content == "x"
    client.create(model="m", messages=HI)
