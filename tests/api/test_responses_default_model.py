"""`/responses` with the real default model, through the real `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from osaurus.bundle.bundle import Bundle
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig
from responses_oracle import check_response, check_stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CAPITAL: dict[str, Any] = {
    "model": "default",
    "input": "What is the capital of France?",
    "temperature": 0,
    "max_output_tokens": 16,
}


@pytest.fixture(scope="module")
def url(default_bundle: Bundle) -> Iterator[str]:
    engine = EngineConfig(max_batch_size=4, kv_budget_bytes=512 * 1024 * 1024)
    source = BundleSource(LoadOptions(device="cpu", engine=engine, disk_cache=False))
    with running_server(source, ServerConfig(port=0, preload="default")) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=500,
        _strict_response_validation=True,
    ) as made:
        yield made


def _events(url: str, **fields: Any) -> list[dict[str, Any]]:
    body = {**CAPITAL, "stream": True, **fields}
    text = httpx2.post(f"{url}/v1/responses", json=body, timeout=500).text
    frames = [frame for frame in text.split("\n\n") if frame.startswith("event: ")]
    return [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]


def test_a_question_is_answered(client: openai.OpenAI) -> None:
    answer = client.responses.create(**CAPITAL)
    check_response(answer.model_dump(mode="json"))
    assert "Paris" in answer.output_text


def test_the_stream_is_legal_and_says_what_the_plain_answer_says(
    client: openai.OpenAI, url: str
) -> None:
    plain = client.responses.create(**CAPITAL)
    final = Response.model_validate(check_stream(_events(url)))
    assert final.output_text == plain.output_text
    assert final.usage
    assert plain.usage
    assert final.usage.output_tokens == plain.usage.output_tokens


def test_chat_completions_and_responses_agree(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": CAPITAL["input"]}],
        temperature=0,
        max_tokens=16,
    )
    assert client.responses.create(**CAPITAL).output_text == chat.choices[0].message.content


def test_a_cut_answer_and_one_that_goes_on_from_it(client: openai.OpenAI) -> None:
    cut = client.responses.create(**{**CAPITAL, "max_output_tokens": 2})
    assert cut.status == "incomplete"
    assert cut.usage
    assert cut.usage.output_tokens == 2
    more = client.responses.create(
        **{**CAPITAL, "input": "Are you sure?"}, previous_response_id=cut.id
    )
    assert more.usage
    assert more.usage.input_tokens > cut.usage.input_tokens


def test_usage_counts_the_whole_prompt_whatever_the_cache_knows(client: openai.OpenAI) -> None:
    fields = {**CAPITAL, "input": "Summarise: " + "The sea is wide and blue. " * 100}
    cold = client.responses.create(**fields).usage
    warm = client.responses.create(**fields).usage
    assert cold
    assert warm
    assert cold.input_tokens == warm.input_tokens
    assert warm.input_tokens_details.cached_tokens > cold.input_tokens_details.cached_tokens
    for usage in (cold, warm):
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_logprobs_of_a_stream_are_those_of_the_plain_answer(
    client: openai.OpenAI, url: str
) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    plain: Any = client.responses.create(**CAPITAL, **asked)
    events = _events(url, **asked)
    check_stream(events)
    streamed = [
        one
        for event in events
        if event["type"] == "response.output_text.delta"
        for one in event["logprobs"]
    ]
    wanted = plain.output[0].content[0].logprobs
    assert [one["token"] for one in streamed] == [one.token for one in wanted]
    for ours, theirs in zip(streamed, wanted, strict=True):
        assert ours["logprob"] == pytest.approx(theirs.logprob, abs=0.01)
        assert len(ours["top_logprobs"]) == 3
    data = bytes(byte for one in streamed for byte in one["bytes"])
    assert data.decode() == plain.output_text


def test_streams_at_once_with_both_kinds_of_client(client: openai.OpenAI, url: str) -> None:
    wanted = client.responses.create(**CAPITAL).output_text

    def streamed() -> str:
        with client.responses.stream(**CAPITAL) as stream:
            return stream.get_final_response().output_text

    async def ask() -> str:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as asynchronous,
            asynchronous.responses.stream(**CAPITAL) as stream,
        ):
            return (await stream.get_final_response()).output_text

    with ThreadPoolExecutor(4) as threads:
        texts = [threads.submit(streamed) for _ in range(3)]
        texts.append(threads.submit(lambda: asyncio.run(ask())))
        assert [text.result() for text in texts] == [wanted] * 4


def test_an_answer_in_a_given_shape_is_parsed(client: openai.OpenAI, url: str) -> None:
    class City(BaseModel):
        city: str
        is_capital: bool

    fields: dict[str, Any] = {**CAPITAL, "max_output_tokens": 60}
    answer = client.responses.parse(**fields, text_format=City)
    assert answer.output_parsed
    assert answer.text
    assert answer.text.format
    assert answer.text.format.type == "json_schema"
    schema = {"type": "json_schema", "name": "city", "schema": City.model_json_schema()}
    final = check_stream(_events(url, max_output_tokens=60, text={"format": schema}))
    assert City.model_validate_json(final["output"][0]["content"][0]["text"])


def test_a_conversation_is_compacted_and_counted(client: openai.OpenAI, url: str) -> None:
    first = client.responses.create(**CAPITAL)
    # Its types know no user's messages here, which the vendor sends as well.
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=500) as lax:
        compacted = lax.responses.compact(model="default", previous_response_id=first.id)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    items: list[Any] = [
        item.model_dump(exclude_none=True, warnings=False) for item in compacted.output
    ]
    fields: dict[str, Any] = {
        "model": "default",
        "input": [*items, {"role": "user", "content": "Go on."}],
    }
    counted = client.responses.input_tokens.count(**fields).input_tokens
    usage = client.responses.create(**fields, max_output_tokens=4).usage
    assert usage
    assert usage.input_tokens == counted


def test_a_long_answer_is_cancelled_in_the_middle(client: openai.OpenAI) -> None:
    fields = {**CAPITAL, "input": "Tell me a very long story.", "max_output_tokens": 4000}
    stream = client.responses.create(**fields, stream=True, extra_body={"ignore_eos": True})
    events = [next(stream)]
    while events[-1].type != "response.output_text.delta":
        events.append(next(stream))
    cancelled = client.responses.cancel(events[0].response.id)
    assert cancelled.status == "cancelled"
    assert list(stream)[-1].type == "response.incomplete"
