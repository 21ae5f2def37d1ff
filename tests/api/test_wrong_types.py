"""Every field of every body, at every depth, with values of every wrong type.

What is refused is a 4xx in the protocol's own form that names the field, or the thing it is in;
nothing is ever a 5xx, and an answer that is given is a whole one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from api.conftest import SEVERAL
from api.scripted_engine import Say, ScriptedEngine, ScriptedSource
from osaurus.server.serve import ServerConfig, running_server

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "get_weather", "description": "d", "parameters": _SCHEMA, "strict": True}
_CALL = {"id": "call_1", "type": "function",
         "function": {"name": "get_weather", "arguments": '{"city":"Bern"}'}}  # fmt: skip
_SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 7, "min_tokens": 1,
}  # fmt: skip
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}

#: One body a route that has all its fields, as far as they go together.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": "u", "name": "n"},
                {"role": "assistant", "content": None, "tool_calls": [_CALL],
                 "reasoning_content": "r"},
                {"role": "tool", "tool_call_id": "call_1", "content": "t"},
            ],
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2,
            "max_tokens": 5, "max_completion_tokens": 5, "n": 1, "stop": ["x"],
            "logit_bias": {"5": 1}, "stream_options": {"include_usage": True},
            "stream": False, "stop_token_ids": [3], "ignore_eos": False, **_SAMPLING,
        },
        {
            "messages": [{"role": "user", "content": "u"}],
            "response_format": _FORMAT, "reasoning_effort": "low", "enable_thinking": False,
            "chat_template_kwargs": {"enable_thinking": False}, "thinking_budget": 5,
            "reasoning": {"effort": "low", "enabled": True, "max_tokens": 5},
            "thinking": {"type": "enabled", "budget_tokens": 5}, "think": True,
        },
        {
            "messages": [{"role": "user", "content": "u"}],
            "structured_outputs": {"choice": ["a", "b"]},
        },
        {"messages": [{"role": "user", "content": "u"}], "guided_choice": ["a"]},
    ],
    "/v1/completions": [
        {
            "prompt": "p", "max_tokens": 5, "n": 1, "stop": ["x"], "logprobs": 2, "echo": False,
            "best_of": 1, "stream": False, "stream_options": {"include_usage": True},
            "logit_bias": {"5": 1}, "response_format": _FORMAT, **_SAMPLING,
        },
        {"prompt": ["p", "q"], "max_tokens": 2},
        {"prompt": [1, 2], "max_tokens": 2},
        {"prompt": [[1, 2], [3]], "max_tokens": 2},
    ],
    "/v1/responses": [
        {
            "input": [
                {"type": "message", "role": "user",
                 "content": [{"type": "input_text", "text": "t"}]},
                {"type": "reasoning", "id": "rs_1",
                 "summary": [{"type": "summary_text", "text": "s"}],
                 "content": [{"type": "reasoning_text", "text": "s"}]},
                {"type": "function_call", "call_id": "call_1", "name": "get_weather",
                 "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1",
                 "output": [{"type": "input_text", "text": "o"}]},
                {"role": "user", "content": "u"},
            ],
            "instructions": "i", "store": False, "background": False, "stream": False,
            "include": ["message.output_text.logprobs"],
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "parallel_tool_calls": True, "truncation": "disabled", "top_logprobs": 2,
            "reasoning": {"effort": "low", "summary": "auto"}, "max_output_tokens": 5,
            "metadata": {"k": "v"}, "stop": ["x"], "max_tool_calls": 3,
            "prompt_cache_key": "k", "safety_identifier": "s", "user": "u", **_SAMPLING,
        },
        {
            "input": "u", "text": {"format": {"type": "json_schema", "name": "n",
                                              "schema": _SCHEMA, "strict": True},
                                   "verbosity": "low"},
        },
        {
            "input": "u", "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto",
                            "tools": [{"type": "function", "name": "get_weather"}]},
        },
    ],
    "/v1/responses/input_tokens": [{"input": "u", "instructions": "i"}],
    "/v1/messages": [
        {
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "toolu_1", "name": "get_weather",
                     "input": {"city": "Bern"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True,
                     "content": [{"type": "text", "text": "r"}]},
                    {"type": "document", "title": "d",
                     "source": {"type": "text", "data": "d"}},
                    {"type": "search_result", "title": "d",
                     "content": [{"type": "text", "text": "r"}]}]},
            ],
            "max_tokens": 5, "stop_sequences": ["x"], "stream": False,
            "temperature": 0.5, "top_p": 0.9, "top_k": 5,
            "tools": [{"name": "get_weather", "description": "d", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "tool", "name": "get_weather",
                            "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
            "output_config": {"effort": "low"}, "metadata": {"user_id": "u"},
            "mcp_servers": [], "thinking_budget": 5,
        },
        {
            "messages": [{"role": "user", "content": "u"}], "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ],
    "/v1/messages/count_tokens": [
        {"messages": [{"role": "user", "content": "u"}], "system": "s",
         "tools": [{"name": "get_weather", "input_schema": _SCHEMA}]},
    ],
    "/api/chat": [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u", "images": []},
                {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [
                    {"function": {"name": "get_weather", "arguments": {"city": "Bern"}}}]},
                {"role": "tool", "tool_name": "get_weather", "content": "t"},
            ],
            "tools": [{"type": "function", "function": _FUNCTION}], "stream": False,
            "think": False, "keep_alive": "5m", "logprobs": True, "top_logprobs": 2,
            "options": {"num_predict": 5, "stop": ["x"], "num_ctx": 100, "repeat_last_n": 5,
                        "repeat_penalty": 1.1, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
                        "min_p": 0.1, "seed": 5, "presence_penalty": 0.1,
                        "frequency_penalty": 0.1},
        },
        {"messages": [{"role": "user", "content": "u"}], "format": _SCHEMA, "stream": False},
    ],
    "/api/generate": [
        {"prompt": "p", "system": "s", "raw": False, "images": [], "stream": False,
         "format": "", "think": False, "keep_alive": 5, "options": {"num_predict": 5}},
    ],
    "/api/show": [{}],
    "/v1/tokenize": [{"prompt": "p"}, {"messages": [{"role": "user", "content": "u"}]}],
    "/v1/detokenize": [{"tokens": [1, 2]}],
}  # fmt: skip

WRONG: tuple[Any, ...] = (
    None, True, 5, -1, 1.5, 10**30, "", "x", "\0\ud7ff\U0010ffff", [], {}, [None], [[]], [5],
    ["x"], [{}], {"a": []}, {"type": []}, {"type": "x"}, {"type": {"a": 1}}, {"name": []},
)  # fmt: skip

_Path = tuple[str | int, ...]


def _paths(value: Any, before: _Path = ()) -> Iterator[_Path]:
    """Every place in a body, containers before what they hold."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*before, key)
        if isinstance(inner, (dict, list)):
            yield from _paths(inner, (*before, key))


def _with(body: dict[str, Any], path: _Path, value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(body)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return changed


def _error(response: httpx2.Response, path: str) -> tuple[str, str]:
    """The field that an error names, and its whole message; its form is the protocol's."""
    error = response.json()
    if path.startswith("/api/"):
        assert set(error) == {"error"}
        return "", error["error"]
    if path.startswith("/v1/messages"):
        assert (set(error), error["type"]) == ({"type", "error"}, "error")
        assert set(error["error"]) == {"type", "message"}
        return "", error["error"]["message"]
    assert set(error["error"]) == {"message", "type", "param", "code"}
    return error["error"]["param"] or "", error["error"]["message"]


def _names(path: _Path, param: str, message: str) -> bool:
    """Whether an error names the field at `path`, or one that holds it."""
    first = re.split(r"[.\[:/]", param or message)[0]
    steps = (step for step in path if isinstance(step, str))
    return first == path[0] or any(re.search(rf"\b{re.escape(step)}\b", message) for step in steps)


def _is_about_company(path: _Path, message: str) -> bool:
    """A call that was asked for by name, which these changes let the model not make, or which
    is no longer offered."""
    return path[0] in ("max_output_tokens", "tools") and "tool_choice" in message


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    source = ScriptedSource({"m": ScriptedEngine(lambda request, index: [Say("Hello!")])})
    config = ServerConfig(port=0, drain_s=0.2, runtime=SEVERAL)
    with (
        running_server(source, config) as url,
        httpx2.Client(base_url=url, timeout=30) as client,
    ):
        yield client


@pytest.mark.parametrize("route", BODIES)
def test_a_field_of_a_wrong_type_is_named_and_never_a_fault_of_ours(
    client: httpx2.Client, route: str
) -> None:
    faults: list[str] = []
    for body in BODIES[route]:
        whole = {"model": "m", **body}
        for path in _paths(whole):
            for value in WRONG:
                response = client.post(route, json=_with(whole, path, value))
                if response.status_code == 200:
                    continue
                said = f"{path} = {value!r}: {response.status_code} {response.text[:200]}"
                if response.status_code >= 500:
                    faults.append(said)
                    continue
                param, message = _error(response, route)
                if response.status_code == 404:
                    if path != ("model",):
                        faults.append(said)
                elif not _names(path, param, message) and not _is_about_company(path, message):
                    faults.append(said)
    assert not faults, f"{len(faults)}:\n" + "\n".join(faults[:400])
