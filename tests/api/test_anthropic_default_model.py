"""Anthropic Messages with the real default model, through the real `anthropic` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from osaurus.bundle.bundle import Bundle
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def client(default_bundle: Bundle) -> Iterator[anthropic.Anthropic]:
    engine = EngineConfig(max_batch_size=4, kv_budget_bytes=512 * 1024 * 1024)
    options = LoadOptions(
        device="cpu", engine=engine, disk_cache=False, aliases=("claude-*=default",)
    )
    with (
        running_server(BundleSource(options), ServerConfig(port=0)) as url,
        anthropic.Anthropic(
            base_url=url,
            api_key="none",
            max_retries=0,
            timeout=500,
            _strict_response_validation=True,
        ) as client,
    ):
        yield client


def _ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    body = {"model": "default", "max_tokens": 16, "messages": CAPITAL, **fields}
    return client.messages.create(**body, extra_body={"temperature": 0})


def _stream(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    body = {"model": "default", "max_tokens": 16, "messages": CAPITAL, **fields}
    with client.messages.stream(**body, extra_body={"temperature": 0}) as stream:
        return stream.get_final_message()


def _text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def _prompt_tokens(usage: anthropic.types.Usage) -> int:
    parts = (
        usage.input_tokens,
        usage.cache_read_input_tokens,
        usage.cache_creation_input_tokens,
    )
    return sum(part or 0 for part in parts)


def test_a_question_is_counted_before_the_model_is_loaded_then_answered(
    client: anthropic.Anthropic,
) -> None:
    count = client.messages.count_tokens(model="default", messages=CAPITAL).input_tokens
    health: Any = client.get("/health", cast_to=object)
    assert health["resident_models"] == []
    plain, streamed = _ask(client), _stream(client)
    assert "Paris" in _text(plain)
    assert _text(plain) == _text(streamed)
    assert plain.stop_reason == streamed.stop_reason == "end_turn"
    assert _prompt_tokens(plain.usage) == _prompt_tokens(streamed.usage) == count
    again = client.messages.count_tokens(model="default", messages=CAPITAL).input_tokens
    assert again == count


def test_a_name_that_claude_code_sends_leads_to_the_model_that_the_setting_says(
    client: anthropic.Anthropic,
) -> None:
    message = _ask(client, model="claude-3-5-haiku-20241022")
    assert message.model == "claude-3-5-haiku-20241022"
    assert _text(message) == _text(_ask(client))
    with pytest.raises(anthropic.NotFoundError):
        _ask(client, model="gpt-nobody")


def test_f45_the_second_time_most_of_a_prompt_comes_from_the_cache(
    client: anthropic.Anthropic,
) -> None:
    system = [
        {
            "type": "text",
            "text": "".join(f"Rule {i}: mind it. " for i in range(100)),
            "cache_control": {"type": "ephemeral"},
        }
    ]
    count = client.messages.count_tokens(
        model="default",
        messages=CAPITAL,
        system=system,  # pyright: ignore[reportArgumentType]
    ).input_tokens
    assert count > 600
    first, second = _ask(client, system=system), _stream(client, system=system)
    assert _text(first) == _text(second)
    assert _prompt_tokens(first.usage) == _prompt_tokens(second.usage) == count
    assert (second.usage.cache_read_input_tokens or 0) > 500
    assert first.usage.output_tokens == second.usage.output_tokens
    body: dict[str, Any] = {"model": "default", "max_tokens": 4, "messages": CAPITAL}
    start = next(iter(client.messages.create(**body, system=system, stream=True)))
    assert start.type == "message_start"
    assert start.message.usage.cache_read_input_tokens == second.usage.cache_read_input_tokens


def test_a_conversation_with_tools_is_answered_and_counted_alike(
    client: anthropic.Anthropic,
) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 C"}
    messages = [
        {"role": "user", "content": "How warm is Bern?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "Tell me."}]},
    ]
    body: dict[str, Any] = {"messages": messages, "tools": [WEATHER]}
    message = _ask(client, **body)
    assert message.content
    count = client.messages.count_tokens(model="default", **body).input_tokens
    assert _prompt_tokens(message.usage) == count


def test_an_answer_has_the_shape_that_the_request_asks_for(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    shape: Any = {"format": {"type": "json_schema", "schema": schema}}
    for message in (
        _ask(client, output_config=shape, max_tokens=60),
        _stream(client, output_config=shape, max_tokens=60),
    ):
        assert json.loads(_text(message)) in ({"city": "Paris"}, {"city": "Rome"})
    broken: Any = {"format": {"type": "json_schema", "schema": {"type": "strange"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        _ask(client, output_config=broken)


def test_f11_a_call_is_made_where_one_must_be(client: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    for ask in (_ask, _stream):
        message = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=60)
        assert message.stop_reason == "tool_use"
        (call,) = (block for block in message.content if block.type == "tool_use")
        assert call.name == "get_weather"
        assert isinstance(call.input["city"], str)


def test_an_answer_goes_on_where_it_was_begun(client: anthropic.Anthropic) -> None:
    begun = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]
    assert _text(_ask(client, messages=begun, max_tokens=4)).startswith(" Paris")


def test_a_prompt_over_the_context_is_a_400_with_both_numbers(client: anthropic.Anthropic) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* > 8192 maximum"):
        _ask(client, messages=long)
    assert client.messages.count_tokens(model="default", messages=long).input_tokens > 8192
