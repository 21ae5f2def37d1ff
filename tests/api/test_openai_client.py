"""What the vendor's client offers beyond plain calls: its async twin, its stream and parse helpers,
raw responses, and the fields that it sends along. Answers are checked against its own types."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from api.conftest import Running, Start
from api.scripted_engine import Emit, Say, Step
from osaurus.types.engine import GenerationRequest
from osaurus.types.events import Reasoning, ToolCall

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


class get_weather(pydantic.BaseModel):
    """The weather in a city."""

    city: str


def everything(request: GenerationRequest, index: int) -> Sequence[Step]:
    return [
        Emit(Reasoning("thinking about it")),
        Say("Looking it up."),
        Emit(ToolCall(name="get_weather", arguments={"city": "Bern"}, call_id="call_1")),
        Emit(ToolCall(name="get_weather", arguments={"city": "Oslo"}, call_id="call_2")),
    ]


@pytest.fixture
def client(start: Start) -> Iterator[openai.OpenAI]:
    with strict(start(everything)) as client:
        yield client


def strict(running: Running) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{running.url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    )


def test_the_stream_helper_puts_a_whole_answer_together(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(get_weather)]
    with client.chat.completions.stream(model="m", messages=HI, tools=tools) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.done"} <= {
        *kinds
    }
    message = answer.choices[0].message
    assert message.content == "Looking it up."
    assert message.tool_calls is not None
    assert [call.id for call in message.tool_calls] == ["call_1", "call_2"]
    assert [call.function.parsed_arguments for call in message.tool_calls] == [
        get_weather(city="Bern"),
        get_weather(city="Oslo"),
    ]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_the_parse_helper_gets_typed_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="m", messages=HI, tools=[openai.pydantic_function_tool(get_weather)]
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[1].function.parsed_arguments == get_weather(city="Oslo")


def test_thinking_is_beside_the_content_in_both_forms(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HI)
    extra = answer.choices[0].message.model_extra
    assert extra is not None
    assert extra["reasoning_content"] == "thinking about it"
    chunks = client.chat.completions.create(model="m", messages=HI, stream=True)
    parts = [
        (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") for chunk in chunks
    ]
    assert "".join(filter(None, parts)) == "thinking about it"


def test_the_async_client_reads_the_same(start: Start) -> None:
    running = start(everything)

    async def ask() -> tuple[Any, list[Any], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1",
            api_key="none",
            max_retries=0,
            _strict_response_validation=True,
        ) as client:
            whole = await client.chat.completions.create(model="m", messages=HI, n=2)
            stream = await client.chat.completions.create(
                model="m", messages=HI, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            models = [model.id async for model in client.models.list()]
            return whole, chunks, models

    whole, chunks, models = asyncio.run(ask())
    assert [choice.message.content for choice in whole.choices] == ["Looking it up."] * 2
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == "Looking it up."
    assert chunks[-1].usage.completion_tokens == len("Looking it up.")
    assert models == ["m"]


def test_the_request_id_reaches_the_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HI)
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")
    raw = client.chat.completions.with_raw_response.create(model="m", messages=HI)
    assert raw.request_id is not None
    assert raw.request_id != answer._request_id


def test_fields_about_accounts_and_billing_change_nothing(start: Start) -> None:
    running = start()
    client = strict(running)
    plain = client.chat.completions.create(model="m", messages=HI)
    more = client.chat.completions.create(
        model="m",
        messages=HI,
        service_tier="auto",
        store=True,
        metadata={"a": "b"},
        user="somebody",
        safety_identifier="x",
        prompt_cache_key="y",
        verbosity="low",
        prediction={"type": "content", "content": "z"},
        modalities=["text"],
    )
    assert more.choices == plain.choices
    first, second = running.engine.requests
    assert (first.params, list(first.token_ids)) == (second.params, list(second.token_ids))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"functions": [{"name": "f", "parameters": {}}]}, "old form of tools"),
        ({"function_call": "auto"}, "old form of tool_choice"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "writes text only"),
        ({"modalities": ["text", "audio"]}, "writes text only"),
        ({"web_search_options": {}}, "a tool that searches"),
    ],
)
def test_what_is_not_served_is_refused_with_what_to_do(
    client: openai.OpenAI, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(model="m", messages=HI, **fields)
    assert caught.value.param == next(iter(fields))


def test_both_names_of_the_limit_are_read_and_the_older_one_wins(start: Start) -> None:
    running = start()
    client = strict(running)
    client.chat.completions.create(model="m", messages=HI, max_completion_tokens=3)
    client.chat.completions.create(model="m", messages=HI, max_completion_tokens=3, max_tokens=2)
    assert [r.params.max_tokens for r in running.engine.requests] == [3, 2]


def test_a_model_is_shown_by_its_id(client: openai.OpenAI) -> None:
    model = client.models.retrieve("m")
    assert (model.id, model.object, model.owned_by) == ("m", "model", "osaurus")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
