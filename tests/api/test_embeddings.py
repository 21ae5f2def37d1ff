"""Embeddings over HTTP by the vendor's client, with a small encoder, and with MiniLM."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest
import torch

import tiny_embedders
from api.conftest import Running
from osaurus.bundle.hub import find_model
from osaurus.errors import ModelNotFound
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.runtime import RuntimeSettings


@dataclass(frozen=True)
class Served:
    url: str
    model: str
    client: openai.OpenAI
    reference: Any
    source: BundleSource

    def embed(self, given: Any, **fields: Any) -> openai.types.CreateEmbeddingResponse:
        return self.client.embeddings.create(model=self.model, input=given, **fields)

    def post(self, **body: Any) -> httpx2.Response:
        return httpx2.post(
            f"{self.url}/v1/embeddings", json={"model": self.model, **body}, timeout=30
        )

    def health(self) -> dict[str, Any]:
        return httpx2.get(f"{self.url}/health", timeout=30).json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("made-encoder")
    reference = tiny_embedders.save_encoder(folder, max_tokens=24)
    source = BundleSource(LoadOptions(device="cpu"), allow_paths=True)
    with (
        running_server(source, ServerConfig(port=0)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(url, str(folder), client, reference, source)


def refused(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.post(**body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_a_text_becomes_the_models_vector(served: Served) -> None:
    answer = served.embed("the cat sat")
    ids = served_ids(served, "the cat sat")
    wanted = tiny_embedders.reference(served.reference, ids, "mean_tokens")
    torch.testing.assert_close(torch.tensor(answer.data[0].embedding), wanted, rtol=1e-4, atol=2e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(ids)
    assert (answer.object, answer.data[0].object, answer.model) == (
        "list",
        "embedding",
        served.model,
    )


def served_ids(served: Served, text: str) -> list[int]:
    body = {"model": served.model, "prompt": text}
    return httpx2.post(f"{served.url}/tokenize", json=body, timeout=30).json()["tokens"]


def test_many_texts_keep_their_order_and_do_not_change_each_other(served: Served) -> None:
    texts = ["the sun", "rain", "a dog ran in the hot sun and it was hot", "rain"]
    together = served.embed(texts)
    assert [one.index for one in together.data] == [0, 1, 2, 3]
    alone = [served.embed(text) for text in texts]
    assert [one.embedding for one in together.data] == [one.data[0].embedding for one in alone]
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)


def test_base64_holds_the_same_numbers_as_floats(served: Served) -> None:
    floats = served.post(input="the sea", encoding_format="float").json()["data"][0]["embedding"]
    text = served.post(input="the sea", encoding_format="base64").json()["data"][0]["embedding"]
    data = base64.b64decode(text)
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == floats
    assert served.post(input="the sea").json()["data"][0]["embedding"] == floats
    # The client asks for base64 by itself and unpacks it.
    assert served.embed("the sea").data[0].embedding == pytest.approx(floats)


def test_token_ids_are_taken_as_they_are(served: Served) -> None:
    ids = served_ids(served, "a mat")
    assert served.embed(ids).data[0].embedding == served.embed("a mat").data[0].embedding
    several = served.embed([ids, ids[1:-1]])
    assert several.usage.prompt_tokens == 2 * len(ids) - 2
    assert several.data[0].embedding != several.data[1].embedding


def test_fewer_dimensions_are_the_first_ones_scaled_to_length_one(served: Served) -> None:
    whole = served.embed("the moon").data[0].embedding
    cut = served.embed("the moon", dimensions=8).data[0].embedding
    length = math.sqrt(sum(x * x for x in whole[:8]))
    assert cut == pytest.approx([x / length for x in whole[:8]], abs=1e-6)
    assert sum(x * x for x in cut) == pytest.approx(1, abs=1e-6)
    assert served.embed("the moon", dimensions=48).data[0].embedding == whole


def test_a_text_over_the_limit_is_refused_with_both_numbers_or_cut_when_asked(
    served: Served,
) -> None:
    long = "cat " * 30
    error = refused(served, input=["cat", long])
    assert error["param"] == "input[1]"
    assert "32 tokens > 24 maximum" in error["message"]
    cut = served.post(input=[long, "cat " * 22], truncate=True).json()
    assert cut["data"][0]["embedding"] == cut["data"][1]["embedding"]
    assert cut["usage"]["prompt_tokens"] == 48
    huge = refused(served, input="x" * 2_000_000)
    assert "2000000 characters" in huge["message"]


def test_marks_in_a_text_are_text(served: Served) -> None:
    assert served_ids(served, "the cat")[0] == 2
    counts = served.embed(["[SEP] the cat"]).usage.prompt_tokens
    assert counts > served.embed(["the cat"]).usage.prompt_tokens + 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [[1, "a"]]}, "input[0]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [320]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 49}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({}, "input"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    assert refused(served, **fields)["param"] == param


def test_a_model_that_writes_text_makes_no_vectors(running: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no embeddings") as caught:
        running.client().embeddings.create(model="m", input="x")
    assert caught.value.param == "model"


def test_an_embedding_model_writes_no_text(served: Served) -> None:
    for ask in (
        lambda: served.client.chat.completions.create(
            model=served.model, messages=[{"role": "user", "content": "hi"}]
        ),
        lambda: served.client.completions.create(model=served.model, prompt="hi"),
    ):
        with pytest.raises(openai.BadRequestError, match="writes no text") as caught:
            ask()
        assert caught.value.param == "model"


def test_the_model_is_resident_like_any_other_and_unloads(served: Served) -> None:
    served.embed("x")
    (row,) = served.health()["resident_models"]
    assert row["inflight"] == 0
    assert row["context_tokens"] == 24
    assert row["idle_seconds_remaining"] > 0
    unloaded = httpx2.post(f"{served.url}/admin/unload", timeout=30).json()["unloaded"]
    assert unloaded == [row["name"]]
    assert served.health()["resident_models"] == []
    assert served.embed("x").data, "it is loaded again"


def test_a_client_that_goes_away_stops_the_work_and_gives_the_lease_back(served: Served) -> None:
    served.embed("warm")
    gate = served.source.gate("cpu")
    ticket = gate.enter("held by the test", lambda: None)
    try:
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(
                f"{served.url}/v1/embeddings",
                json={"model": served.model, "input": ["the cat"] * 500},
                timeout=0.5,
            )
        deadline = time.monotonic() + 20
        while served.health()["inflight"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert served.health()["inflight"] == {}, "let go although it never had the device"
    finally:
        gate.leave(ticket)
    assert served.embed("still there").data


def test_requests_at_once_each_get_their_own_vectors(served: Served) -> None:
    texts = [f"{word} {other}" for word in tiny_embedders.WORDS[:8] for other in ("sun", "sea")]
    wanted = {text: served.embed(text).data[0].embedding for text in texts}
    found: dict[str, list[float]] = {}

    def ask(text: str) -> None:
        found[text] = served.embed(text).data[0].embedding

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == wanted


def test_the_async_client_is_served_too(served: Served) -> None:
    async def ask() -> list[float]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            answer = await client.embeddings.create(model=served.model, input=["rain"])
            return answer.data[0].embedding

    assert asyncio.run(ask()) == served.embed("rain").data[0].embedding


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_minilm_puts_like_sentences_together_and_stays_beside_the_default_model() -> None:
    try:
        find_model("minilm"), find_model("default")
    except ModelNotFound as error:
        pytest.skip(error.message)
    source = BundleSource(LoadOptions(device="cpu", disk_cache=False))
    config = ServerConfig(port=0, runtime=RuntimeSettings())
    with (
        running_server(source, config) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        hello = [{"role": "user", "content": "Say hello."}]
        for _ in range(2):
            client.chat.completions.create(model="default", messages=hello, max_tokens=2)  # type: ignore[arg-type]
            answer = client.embeddings.create(
                model="minilm",
                input=["A man eats food.", "A man is eating a piece of bread.", "Stocks fell."],
            )
        a, b, c = (torch.tensor(one.embedding) for one in answer.data)
        assert a @ b > 0.5 > a @ c
        assert len(a) == 384
        loaded = httpx2.get(f"{url}/health", timeout=30).json()["loaded"]
        assert len(loaded) == 2, "an embedding model does not push a chat model out"
