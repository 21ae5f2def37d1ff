"""Ollama's protocol with the real default model and the real clients. Field cases F39, F41, F45 in
Ollama's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import ollama
import pytest

from api.ollama_rig import WAYS, Answer, Way, ask
from osaurus.bundle.bundle import Bundle
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
REPEATING = "The sea, the sea, the sea, the sea,"


class Served:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, way: Way = "plain", what: str = "chat", **fields: Any) -> Answer:
        options = {"temperature": 0, "num_predict": 16, **fields.pop("options", {})}
        running: Any = self  # as much of one as the clients need
        return ask(running, way, what, model="default", options=options, **fields)


@pytest.fixture(scope="module")
def served(default_bundle: Bundle) -> Iterator[Served]:
    engine = EngineConfig(max_batch_size=4, kv_budget_bytes=512 * 1024 * 1024)
    source = BundleSource(LoadOptions(device="cpu", engine=engine, disk_cache=False))
    with running_server(source, ServerConfig(port=0, preload="default")) as url:
        yield Served(url)


def test_every_way_of_asking_gives_the_same_answer(served: Served) -> None:
    answers = [served.ask(way, messages=CAPITAL) for way in WAYS]
    assert "Paris" in answers[0].text
    assert {answer.text for answer in answers} == {answers[0].text}
    assert {answer.last.eval_count for answer in answers} == {answers[0].last.eval_count}
    prompts = [served.ask(way, "generate", prompt=CAPITAL[0]["content"]) for way in WAYS]
    assert {answer.text for answer in prompts} == {answers[0].text}


def test_a_raw_prompt_is_gone_on_from_without_a_template(served: Served) -> None:
    answer = served.ask(what="generate", prompt="The capital of France is", raw=True)
    assert "Paris" in answer.text
    assert answer.last.prompt_eval_count == 5
    with pytest.raises(ollama.ResponseError, match="suffix: ") as caught:
        served.ask(what="generate", prompt="def f(", suffix="return 1")
    assert caught.value.status_code == 400


def test_f39_penalties_act_and_none_is_the_default(served: Served) -> None:
    def sampled(**options: Any) -> str:
        options = {"num_predict": 40, **options}
        return served.ask(what="generate", prompt=REPEATING, raw=True, options=options).text

    default, penalised = sampled(), sampled(frequency_penalty=2.0)
    assert sampled(frequency_penalty=0) == default
    assert penalised != default

    def repeats(text: str) -> float:
        words = text.lower().split()
        return len(words) / len(set(words))

    assert repeats(penalised) < repeats(default)


def test_f45_the_prompts_count_is_the_same_cold_and_cached(served: Served) -> None:
    text = "Tell me of " + "the sea, " * 260
    messages = [{"role": "user", "content": text}]
    for way in WAYS:
        counts = {served.ask(way, messages=messages).last.prompt_eval_count for _ in range(2)}
        assert len(counts) == 1
        assert counts.pop() > 500


def test_logprobs_join_to_the_text_in_every_way(served: Served) -> None:
    found = [served.ask(way, messages=CAPITAL, logprobs=True, top_logprobs=3) for way in WAYS]
    for answer in found:
        assert "".join(token for token, _, _ in answer.logprobs) == answer.text
        assert [token for token, _, _ in answer.logprobs] == [t for t, _, _ in found[0].logprobs]
        assert all(len(top) == 3 for _, _, top in answer.logprobs)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "size": {"$ref": "#/$defs/size"},
    },
    "required": ["city", "population", "size"],
    "additionalProperties": False,
    "$defs": {"size": {"enum": ["small", "large"]}},
}


@pytest.mark.parametrize("way", WAYS)
def test_f41_an_answer_has_the_shape_of_its_schema(served: Served, way: Way) -> None:
    options = {"num_predict": 120}
    answer = served.ask(way, messages=CAPITAL, format=SCHEMA, options=options)
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert answer.last.done_reason == "stop"
    prompt = served.ask(way, "generate", prompt="Paris?", format=SCHEMA, options=options)
    jsonschema.validate(json.loads(prompt.text), SCHEMA)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "string", "pattern": "a(?=b)"}, "pattern"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"$ref": "#"}, "$ref"),
        ({"type": "array", "items": {}, "minItems": 3, "maxItems": 2}, "Items"),
        ({"type": "thing"}, "type"),
    ],
)
def test_f41_a_schema_that_cannot_be_enforced_is_refused_by_its_place(
    served: Served, schema: dict[str, Any], pointer: str
) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(ollama.ResponseError) as caught:
        served.ask(messages=CAPITAL, format=whole)
    assert caught.value.status_code == 400
    assert caught.value.error.startswith("format")
    assert "/properties/a" in caught.value.error or pointer == "$ref"


def test_a_real_model_is_listed_shown_and_running(served: Served) -> None:
    with ollama.Client(served.url) as client:
        shown = client.show("smollm2:135m")
        assert shown.modelinfo is not None
        assert shown.modelinfo["llama.context_length"] == 8192
        assert shown.details is not None
        assert shown.details.parameter_size == "134.5M"
        served.ask(messages=CAPITAL)
        (row,) = client.ps().models
        assert row.context_length == 8192
        assert row.model in [one.model for one in client.list().models]
        with pytest.raises(ollama.ResponseError, match="makes no embeddings") as caught:
            client.embed("default", "hello")
        assert caught.value.status_code == 400
