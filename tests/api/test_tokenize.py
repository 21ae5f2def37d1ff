"""`/tokenize` and `/detokenize`, and the endpoints that are not served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import tiny_embedders
from api.conftest import Running, Start
from api.scripted_engine import ByteTokenizer, ScriptedEngine, ScriptedSource
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.apis.images import UNSUPPORTED
from osaurus.server.serve import ServerConfig, running_server

HI = [{"role": "user", "content": "hi<|im_end|>"}]


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx2.post(f"{url}{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(running: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx2.post(f"{running.url}{path}", json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_a_prompt_becomes_the_ids_that_a_completion_runs(running: Running) -> None:
    text = "<|im_start|>né"
    found = post(running.url, "/tokenize", model="m", prompt=text)
    running.client().completions.create(model="m", prompt=text)
    assert found["tokens"] == list(running.engine.requests[-1].token_ids)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 4096
    assert found["token_strs"] is None


def test_messages_become_the_ids_that_a_chat_runs(running: Running) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": HI}
    found = post(running.url, "/tokenize", **fields)
    running.client().chat.completions.create(**fields)
    assert found["tokens"] == list(running.engine.requests[-1].token_ids)
    end = running.tokenizer.added_tokens["<|im_end|>"]
    assert found["tokens"].count(end) == 1, "what a client writes stays text"
    fewer = post(running.url, "/tokenize", add_generation_prompt=False, **fields)
    assert fewer["count"] < found["count"]


def test_what_belongs_around_a_text_is_added_unless_told_otherwise(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()}, ByteTokenizer(add_bos_to_chat=True))
    source.tokenizer.frame = ((), (0,))
    url = start(source=source).url
    bos = source.tokenizer.bos_token_id
    assert post(url, "/tokenize", model="m", prompt="a")["tokens"] == [bos, 97, 0]
    bare = post(url, "/tokenize", model="m", prompt="a", add_special_tokens=False)
    assert bare["tokens"] == [97]


def test_llama_cpps_names_are_taken(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()}, ByteTokenizer(add_bos_to_chat=True))
    url = start(source=source).url
    bos = source.tokenizer.bos_token_id
    assert post(url, "/tokenize", model="m", content="a")["tokens"] == [97]
    assert post(url, "/tokenize", model="m", content="a", add_special=True)["tokens"] == [bos, 97]
    plain = post(url, "/tokenize", model="m", content="<bos>", parse_special=False)["tokens"]
    assert plain == list(b"<bos>")
    pieces = post(url, "/tokenize", model="m", content="aé", with_pieces=True)["tokens"]
    assert pieces == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]
    assert post(url, "/detokenize", model="m", tokens=[97, 98])["content"] == "ab"


def test_ids_become_their_text_again(running: Running) -> None:
    text = "né <|im_end|> 🦕"
    ids = post(running.url, "/tokenize", model="m", prompt=text, return_token_strs=True)
    assert "".join(ids["token_strs"]).startswith("n")
    assert post(running.url, "/v1/detokenize", model="m", tokens=ids["tokens"])["prompt"] == text


def test_nothing_is_loaded_for_it(running: Running) -> None:
    post(running.url, "/tokenize", model="m", prompt="x")
    post(running.url, "/detokenize", model="m", tokens=[97])
    assert running.source.loads == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * (4 * 1024 * 1024 + 1)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [259]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(
    running: Running, path: str, body: dict[str, Any], param: str
) -> None:
    assert refused(running, path, model="m", **body)["param"] == param


def test_an_unknown_model_is_a_404(running: Running) -> None:
    answer = httpx2.post(f"{running.url}/tokenize", json={"model": "other", "prompt": "x"})
    assert answer.status_code == 404


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("encoder")
    tiny_embedders.save_encoder(folder)
    source = BundleSource(LoadOptions(device="cpu"), allow_paths=True)
    with running_server(source, ServerConfig(port=0)) as url:
        yield url, folder


def test_an_encoders_marks_are_added(encoder: tuple[str, Path]) -> None:
    url, folder = encoder
    found = post(url, "/tokenize", model=str(folder), prompt="the cat", return_token_strs=True)
    assert found["token_strs"] == ["[CLS]", "the", "cat", "[SEP]"]
    text = post(url, "/detokenize", model=str(folder), tokens=found["tokens"])["prompt"]
    assert text == "[CLS] the cat [SEP]"


@pytest.mark.parametrize("path", sorted(UNSUPPORTED))
@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_pictures_and_sound_are_refused_with_the_reason(
    running: Running, path: str, prefix: str
) -> None:
    answer = httpx2.post(f"{running.url}{prefix}{path}", content=b"\0 not json", timeout=30)
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert error["code"] == "unsupported_endpoint"
    assert error["type"] == "invalid_request_error"
    assert "osaurus runs no model that" in error["message"]


def test_the_vendors_client_sees_the_reason(running: Running) -> None:
    with pytest.raises(openai.APIStatusError, match="makes pictures") as caught:
        running.client().images.generate(model="m", prompt="a cat")
    assert caught.value.status_code == 501
    assert json.loads(caught.value.response.text)["error"]["param"] is None
