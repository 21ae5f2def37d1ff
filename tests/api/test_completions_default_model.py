"""Legacy completions, probabilities and usage with the real default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion

from osaurus.bundle.bundle import Bundle
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = "1, 2, 3, 4, 5, 6,"


@pytest.fixture(scope="module")
def client(default_bundle: Bundle) -> Iterator[openai.OpenAI]:
    engine = EngineConfig(max_batch_size=4, kv_budget_bytes=512 * 1024 * 1024)
    source = BundleSource(LoadOptions(device="cpu", engine=engine, disk_cache=False))
    with (
        running_server(source, ServerConfig(port=0)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def complete(client: openai.OpenAI, prompt: Any = COUNT, **fields: Any) -> Completion:
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    return client.completions.create(model="default", prompt=prompt, **fields)


def stream(client: openai.OpenAI, prompt: Any = COUNT, **fields: Any) -> list[Completion]:
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    return list(client.completions.create(model="default", prompt=prompt, stream=True, **fields))


def test_text_goes_on_where_the_prompt_ends(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    assert text.startswith(" 7, 8,")
    assert "".join(c.text for chunk in stream(client) for c in chunk.choices) == text


def test_ids_and_text_and_company_give_the_same_answer(
    client: openai.OpenAI, default_bundle: Bundle
) -> None:
    tokenizer = default_bundle.load_tokenizer()
    prompts = [COUNT, "The capital of France is", "def add(a, b):\n    return"]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    assert [c.text for c in complete(client, prompts).choices] == alone
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    assert [c.text for c in complete(client, ids).choices] == alone
    counts = sum(map(len, ids))
    usage = complete(client, prompts).usage
    assert usage is not None
    assert usage.prompt_tokens == counts


def test_a_raw_prompt_in_the_template_s_words_is_the_chat(client: openai.OpenAI) -> None:
    """The same ids by either way: markup in a raw prompt is markup."""
    url = str(client.base_url).removesuffix("/v1/")
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=12
    )
    asked = {"model": "default", "messages": messages}
    ids = httpx2.post(f"{url}/tokenize", json=asked, timeout=60).json()["tokens"]
    text = httpx2.post(f"{url}/detokenize", json={"model": "default", "tokens": ids}).json()
    for prompt in (ids, text["prompt"]):
        assert complete(client, prompt).choices[0].text == chat.choices[0].message.content


def test_f43_logprobs_streamed_and_plain_are_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": 3, "stop": "10"}
    choice = complete(client, "🦕 né " + COUNT, **fields).choices[0]
    plain = choice.logprobs
    assert plain is not None
    assert plain.tokens is not None
    assert plain.top_logprobs is not None
    tokens: list[str] = []
    values: list[float] = []
    for chunk in stream(client, "🦕 né " + COUNT, **fields):
        for piece in chunk.choices:
            if piece.logprobs is not None:
                tokens += piece.logprobs.tokens or []
                values += piece.logprobs.token_logprobs or []
    assert tokens == plain.tokens
    assert values == pytest.approx(plain.token_logprobs, abs=0.01)
    assert "".join(tokens).startswith(choice.text)
    for token, value, best in zip(tokens, values, plain.top_logprobs, strict=True):
        assert len(best) == 3
        assert best[token] == pytest.approx(value)
        assert max(best.values()) == pytest.approx(value), "the likeliest one, at temperature 0"


def test_f45_usage_means_the_same_on_chat_and_completions(
    client: openai.OpenAI, default_bundle: Bundle
) -> None:
    tokenizer = default_bundle.load_tokenizer()
    ids = [*tokenizer.encode("A story of completions. " * 400)][:800]
    first, second = complete(client, ids), complete(client, ids)
    streamed = stream(client, ids, stream_options={"include_usage": True})[-1]
    usages = [first.usage, second.usage, streamed.usage]
    cached = []
    for usage in usages:
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens == 800
        assert usage.completion_tokens == 12
        assert usage.total_tokens == 812
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert 700 < (cached[1] or 0) < 800
    assert cached[2] == cached[1]

    messages: Any = [{"role": "user", "content": "A story of chats. " * 150}]
    asked: dict[str, Any] = {"model": "default", "messages": messages, "max_tokens": 4}
    counts = []
    for number in range(2):
        whole = client.chat.completions.create(**asked, temperature=0)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        known = whole.usage.prompt_tokens_details.cached_tokens or 0
        assert (known > 0) == (number > 0)
        counts.append((whole.usage.prompt_tokens, whole.usage.completion_tokens))
    *_, last = client.chat.completions.create(
        **asked, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage is not None
    counts.append((last.usage.prompt_tokens, last.usage.completion_tokens))
    assert len(set(counts)) == 1
