"""Legacy `/v1/completions` through the real `openai` client, on the scripted engine: one byte is
one token there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion

from api.conftest import Running, Start
from api.scripted_engine import (
    ByteTokenizer,
    Fail,
    Hold,
    Say,
    ScriptedEngine,
    ScriptedSource,
    Step,
    say_hello,
)
from osaurus.types.engine import GenerationRequest


def complete(running: Running, prompt: Any = "Once", **fields: Any) -> Completion:
    return running.client().completions.create(model="m", prompt=prompt, **fields)


def stream(running: Running, prompt: Any = "Once", **fields: Any) -> list[Completion]:
    answer = running.client().completions.create(model="m", prompt=prompt, stream=True, **fields)
    return list(answer)


def text_of(chunks: Sequence[Completion], index: int = 0) -> str:
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


def refused(running: Running, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "x", **body}
    answer = httpx2.post(f"{running.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def answer_prompt(request: GenerationRequest, index: int) -> Sequence[Step]:
    """Says the prompt's last letter, then the number of the choice."""
    return [Say(f"<{chr(request.token_ids[-1])}{index}>")]


def test_a_plain_answer_has_the_published_shape(running: Running) -> None:
    answer = complete(running)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "m")
    (choice,) = answer.choices
    assert (choice.index, choice.text) == (0, "Hello!")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 6, 10)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_says_the_same_and_ends_once(running: Running) -> None:
    chunks = stream(running, stream_options={"include_usage": True})
    assert text_of(chunks) == "Hello!"
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10
    raw = httpx2.post(
        f"{running.url}/v1/completions", json={"model": "m", "prompt": "x", "stream": True}
    ).text
    assert raw.endswith("data: [DONE]\n\n")
    assert raw.count('"finish_reason":"stop"') == 1


def test_the_prompt_is_raw_and_its_special_tokens_count(running: Running) -> None:
    complete(running, "<|im_start|>user\nhi")
    special = running.tokenizer.added_tokens["<|im_start|>"]
    assert list(running.engine.requests[-1].token_ids) == [special, *b"user\nhi"]


def test_a_bos_is_put_first_where_the_bundle_wants_one_and_never_twice(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()}, ByteTokenizer(add_bos_to_chat=True))
    running = start(source=source)
    bos = source.tokenizer.bos_token_id
    for prompt in ("hi", "<bos>hi"):
        complete(running, prompt)
        assert list(running.engine.requests[-1].token_ids) == [bos, *b"hi"]


def test_token_ids_are_taken_as_they_are(running: Running) -> None:
    complete(running, [104, 256, 105])
    assert list(running.engine.requests[-1].token_ids) == [104, 256, 105]


@pytest.mark.parametrize("prompt", [["ab", "cd", "ef"], [[97, 98], [99, 100], [101, 102]]])
def test_several_prompts_are_answered_in_order_with_all_their_choices(
    start: Start, prompt: Any
) -> None:
    running = start(answer_prompt)
    answer = complete(running, prompt, n=2)
    texts = [(c.index, c.text) for c in answer.choices]
    wanted = ["<b0>", "<b1>", "<d0>", "<d1>", "<f0>", "<f1>"]
    assert texts == list(enumerate(wanted))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6, "each prompt once, whatever the number of choices"
    assert answer.usage.completion_tokens == 24
    chunks = stream(running, prompt, n=2)
    assert [text_of(chunks, i) for i in range(6)] == wanted
    ended = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(ended) == list(range(6))


@pytest.mark.parametrize("prompt", ["Once", [79, 110, 99, 101]])
def test_echo_puts_the_prompt_before_every_choice(running: Running, prompt: Any) -> None:
    assert [c.text for c in complete(running, prompt, echo=True, n=2).choices] == [
        "OnceHello!",
        "OnceHello!",
    ]
    chunks = stream(running, prompt, echo=True)
    assert chunks[0].choices[0].text.startswith("Once")
    assert text_of(chunks) == "OnceHello!"


def test_echo_comes_also_where_nothing_was_said(start: Start) -> None:
    running = start(lambda request, index: [])
    assert complete(running, echo=True).choices[0].text == "Once"
    assert text_of(stream(running, echo=True)) == "Once"


def test_thinking_and_calls_come_out_as_they_were_written(start: Start) -> None:
    said = '<think>hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    running = start(lambda request, index: [Say(said)])
    assert complete(running).choices[0].text == said


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"max_tokens": 3}, "Hel", "length"),
        ({"stop": "l"}, "He", "stop"),
        ({"stop": ["zz", "o!"]}, "Hell", "stop"),
        ({}, "Hello!", "stop"),
    ],
)
def test_an_answer_ends_for_the_stated_reason(
    running: Running, fields: dict[str, Any], text: str, reason: str
) -> None:
    (choice,) = complete(running, **fields).choices
    assert (choice.text, choice.finish_reason) == (text, reason)
    chunks = stream(running, **fields)
    assert (text_of(chunks), chunks[-1].choices[0].finish_reason) == (text, reason)


def test_without_a_limit_the_context_is_the_limit(running: Running) -> None:
    complete(running)
    assert running.engine.requests[-1].params.max_tokens == 4096 - 4


def test_sampling_fields_reach_the_engine_by_name(running: Running) -> None:
    complete(
        running,
        temperature=0.3,
        top_p=0.5,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": -100},
        best_of=1,
        user="somebody",
        extra_body={"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True},
    )
    params = running.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.seed, params.top_k) == (0.3, 0.5, 7, 9)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.min_p, params.repetition_penalty) == (0.01, 1.2)
    assert params.logit_bias == {5: -100.0}
    assert params.ignore_eos


def test_f43_logprobs_streamed_and_plain_are_the_same(start: Start) -> None:
    running = start(lambda request, index: [Say("né🦕e STOP")])
    fields: dict[str, Any] = {"logprobs": 3, "stop": "STOP", "temperature": 0}
    (choice,) = complete(running, **fields).choices
    plain = choice.logprobs
    assert plain is not None
    assert plain.tokens is not None
    assert plain.top_logprobs is not None
    joined: dict[str, list[Any]] = {}
    for chunk in stream(running, **fields):
        if (found := chunk.choices[0].logprobs) is not None:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined.setdefault(name, []).extend(getattr(found, name))
    assert joined == {name: getattr(plain, name) for name in joined}
    assert len(plain.tokens) == len("né🦕e ".encode())
    assert plain.tokens[:4] == ["n", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]
    assert plain.text_offset == [0, 1, 1, 2, 2, 2, 2, 3, 4], "where each token's character begins"
    assert all(len(best) == 3 for best in plain.top_logprobs)
    assert plain.top_logprobs[0]["n"] == -0.5
    assert plain.token_logprobs == [-0.5] * 9


def test_logprobs_of_zero_are_the_tokens_own_alone(running: Running) -> None:
    logprobs = complete(running, logprobs=0).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * 6
    assert logprobs.top_logprobs is None


QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def filling(start: Start, marks: Sequence[str], **declared: str) -> Running:
    tokenizer = ByteTokenizer(special=("<|im_end|>", *marks))
    tokenizer.special_tokens = declared
    return start(source=ScriptedSource({"m": ScriptedEngine()}, tokenizer))


@pytest.mark.parametrize(
    ("marks", "prompt"),
    [
        (QWEN, "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"),
            "<fim_prefix>ab<fim_suffix>yz<fim_middle>",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>ab<｜fim▁hole｜>yz<｜fim▁end｜>",
        ),
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "▁<PRE>ab▁<SUF>yz▁<MID>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]yz[PREFIX]ab"),
    ],
)
def test_a_suffix_becomes_the_familys_fill_in_prompt(
    start: Start, marks: Sequence[str], prompt: str
) -> None:
    running = filling(start, marks)
    answer = complete(running, "ab", suffix="yz")
    assert answer.choices[0].text == "Hello!", "the middle alone"
    (request,) = running.engine.requests
    assert running.tokenizer.decode(list(request.token_ids)) == prompt
    ends = {running.tokenizer.added_tokens[mark] for mark in marks}
    assert ends <= request.stop_token_ids, "a mark ends the middle"


def test_marks_that_only_the_bundle_declares_are_used(start: Start) -> None:
    running = filling(
        start, ("<A>", "<B>", "<C>"), prefix_token="<A>", suffix_token="<B>", middle_token="<C>"
    )
    complete(running, "ab", suffix="yz")
    (request,) = running.engine.requests
    assert running.tokenizer.decode(list(request.token_ids)) == "<A>ab<B>yz<C>"


def test_an_empty_suffix_is_a_fill_in_too(start: Start) -> None:
    running = filling(start, QWEN)
    complete(running, "ab", suffix="")
    (request,) = running.engine.requests
    assert running.tokenizer.decode(list(request.token_ids)) == "".join(
        (QWEN[0], "ab", QWEN[1], QWEN[2])
    )


def test_a_suffix_for_a_model_that_does_not_fill_in_is_a_400_that_says_so(running: Running) -> None:
    error = refused(running, suffix="y")
    assert error["param"] == "suffix"
    assert "declares no fill-in-the-middle tokens" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 32, "prompt": ["a"] * 100}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"echo": True, "suffix": "x"}, "echo"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(
    running: Running, fields: dict[str, Any], param: str
) -> None:
    assert refused(running, **fields)["param"] == param
    assert running.engine.requests == []


def test_a_prompt_beyond_the_context_is_a_400_with_both_numbers(start: Start) -> None:
    running = start(max_context_tokens=20)
    error = refused(running, prompt="x" * 30)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "30 tokens > 20" in error["message"]
    assert refused(running, prompt="x" * 30, stream=True)["param"] == "prompt"


def test_a_failure_in_the_middle_of_a_stream_is_an_error_frame_and_an_orderly_end(
    start: Start,
) -> None:
    def script(request: GenerationRequest, index: int) -> Sequence[Step]:
        fails = request.token_ids[-1] == ord("b")
        return [Say("so far"), Fail("it broke")] if fails else [Hold("never")]

    running = start(script)
    body = {"model": "m", "prompt": ["a", "b"], "stream": True}
    text = httpx2.post(f"{running.url}/v1/completions", json=body, timeout=30).text
    assert '"text":"so far"' in text or '"text":"s"' in text
    error, done = text.strip().split("\n\n")[-2:]
    assert '"code":"request_failed"' in error
    assert done == "data: [DONE]"
    running.engine.wait_until_idle()


def test_a_client_that_goes_away_cancels_every_prompt(start: Start) -> None:
    running = start(lambda request, index: [Say("x"), Hold("never")])
    with (
        httpx2.Client() as client,
        client.stream(
            "POST",
            f"{running.url}/v1/completions",
            json={"model": "m", "prompt": ["a", "b"], "n": 2, "stream": True},
        ) as answer,
    ):
        next(answer.iter_lines())
        running.engine.wait_until_held("never", count=4)
    running.engine.wait_until_idle()


def test_the_async_client_is_served_too(start: Start) -> None:
    running = start(say_hello)

    async def ask() -> tuple[str, str]:
        base = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
            whole = await client.completions.create(model="m", prompt="x")
            chunks = await client.completions.create(model="m", prompt="x", stream=True)
            text = [chunk.choices[0].text async for chunk in chunks]
            return whole.choices[0].text, "".join(text)

    assert asyncio.run(ask()) == ("Hello!", "Hello!")
