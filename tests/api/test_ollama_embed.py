"""Ollama's embed and its older form with the real MiniLM and the real clients."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Iterator

import httpx2
import ollama
import pytest

from osaurus.bundle.hub import find_model
from osaurus.errors import ModelNotFound
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = ["The cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose."]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    try:
        find_model("minilm")
    except ModelNotFound as error:
        pytest.skip(f"{error.message}; osaurus pull minilm")
    with running_server(BundleSource(LoadOptions(disk_cache=False)), ServerConfig(port=0)) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


def test_texts_become_vectors_of_length_one_that_tell_meanings_apart(client: ollama.Client) -> None:
    found = client.embed("minilm", TEXTS)
    vectors = [list(vector) for vector in found.embeddings]
    assert [len(vector) for vector in vectors] == [384] * 3
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-3) for vector in vectors)
    near, far = (sum(map(operator.mul, vectors[0], other)) for other in vectors[1:])
    assert near > far + 0.3
    assert found.prompt_eval_count is not None
    assert found.prompt_eval_count > 3 * 5


def test_one_text_the_async_client_and_the_older_form_give_the_same_vector(
    url: str, client: ollama.Client
) -> None:
    async def embed() -> list[float]:
        async with ollama.AsyncClient(url) as other:
            return list((await other.embed("minilm:latest", TEXTS[0])).embeddings[0])

    vector = list(client.embed("minilm", TEXTS[0]).embeddings[0])
    assert asyncio.run(embed()) == vector
    assert list(client.embeddings("minilm", TEXTS[0]).embedding) == vector


def test_dimensions_truncation_and_keep_alive(client: ollama.Client) -> None:
    assert len(client.embed("minilm", TEXTS[0], dimensions=64).embeddings[0]) == 64
    long = "sea " * 2000
    assert len(client.embed("minilm", long, keep_alive="2h").embeddings[0]) == 384
    with pytest.raises(ollama.ResponseError, match="maximum") as caught:
        client.embed("minilm", long, truncate=False)
    assert caught.value.status_code == 400
    assert client.show("minilm").capabilities == ["embedding"]
    (row,) = client.ps().models
    assert row.expires_at is not None


def test_openais_body_on_the_same_path_is_answered_in_its_form(url: str) -> None:
    body = {"model": "minilm", "input": TEXTS[0]}
    for prefix in ("/v1", "/api"):
        answer = httpx2.post(f"{url}{prefix}/embeddings", json=body, timeout=60).json()
        assert answer["object"] == "list"
    refused = httpx2.post(f"{url}/api/embeddings", json={"model": "minilm"})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("prompt: is required")
