"""`/v1/chat/completions` through the real `openai` client: plain, streamed, and both alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from api.conftest import Running, Start
from api.scripted_engine import CHATML, Emit, Fail, Hold, Say, Step
from osaurus.server.serve import ServerConfig
from osaurus.types.engine import GenerationRequest
from osaurus.types.events import Chunk, PrefillProgress, Reasoning, ToolCall

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
HI_TOKENS = len("?user\nhi?\n?assistant\n")  # a question mark stands for a control token


def _texts(chunks: Iterable[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def test_a_plain_answer_has_the_published_shape(running: Running) -> None:
    answer = running.client().chat.completions.create(model="m", messages=HI)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "m")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == HI_TOKENS
    assert answer.usage.completion_tokens == len("Hello!")
    assert answer.usage.total_tokens == HI_TOKENS + len("Hello!")
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_has_the_published_shape(running: Running) -> None:
    stream = running.client().chat.completions.create(model="m", messages=HI, stream=True)
    chunks = list(stream)
    assert _texts(chunks) == "Hello!"
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert all(isinstance(chunk.choices[0].delta.content, str) for chunk in middle)
    assert all(chunk.choices[0].finish_reason is None for chunk in (first, *middle))
    assert last.choices[0].finish_reason == "stop"
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (first.id, first.created, "m", "chat.completion.chunk")
    }
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_in_a_stream_that_asks_for_it(running: Running) -> None:
    chunks = list(
        running.client().chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    *before, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (HI_TOKENS, 6)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in before)


def test_thinking_and_calls_have_their_own_fields_and_every_delta_has_content(
    start: Start,
) -> None:
    calls = [
        ToolCall(name="get_weather", arguments={"city": "Bern", "note": "x" * 3000}),
        ToolCall(name="get_weather", arguments={"city": "Oslo"}),
    ]
    running = start(lambda request, index: [Emit(Reasoning("hm")), *map(Emit, calls)])
    client = running.client().chat.completions
    message = client.create(model="m", messages=HI).choices[0].message
    chunks = list(client.create(model="m", messages=HI, stream=True))

    assert message.content is None
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "hm"
    assert message.tool_calls is not None
    plain = [
        (call.function.name, call.function.arguments)
        for call in message.tool_calls
        if call.type == "function"
    ]
    pieces: dict[int, list[str]] = {}
    names: list[tuple[str | None, str | None]] = []
    for chunk in chunks[:-1]:
        delta = chunk.choices[0].delta
        assert delta.content == ""
        for piece in delta.tool_calls or ():
            assert piece.function is not None
            pieces.setdefault(piece.index, []).append(piece.function.arguments or "")
            if piece.id:
                names.append((piece.id, piece.function.name))
                assert piece.type == "function"
            else:
                assert piece.function.name is None
    assert [name for _, name in names] == ["get_weather", "get_weather"]
    assert len({call_id for call_id, _ in names}) == 2
    assert [("get_weather", "".join(parts)) for parts in pieces.values()] == plain
    assert max(len(part) for parts in pieces.values() for part in parts) <= 1024
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_thinking_that_was_cut_leaves_empty_content_and_says_length(start: Start) -> None:
    running = start(lambda request, index: [Emit(Reasoning("hmm")), Emit(Chunk("")), Say("x" * 50)])
    answer = running.client().chat.completions.create(model="m", messages=HI, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "xxxx"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_length_limit_holds_under_both_names(start: Start, field: str) -> None:
    running = start(lambda request, index: [Say("a" * 100)])
    answer = running.client().chat.completions.create(
        model="m",
        messages=HI,
        **{field: 8},
    )
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def test_without_a_limit_the_context_is_the_limit(start: Start) -> None:
    running = start(lambda request, index: [Say("a" * 500)], max_context_tokens=100)
    answer = running.client().chat.completions.create(model="m", messages=HI)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 100
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "stop", "visible"),
    [
        ("ababc", "ababc", ""),
        ("xSTOPy", ["STOP"], "x"),
        ("foo END bar HALT", ["HALT", "END"], "foo "),
        ("né e", "é", "n"),
        ("STOP", "STOP", ""),
        ("abc", ["zzz", ""], "abc"),
    ],
)
def test_stop_strings_cut_streams_and_plain_answers_alike(
    start: Start, text: str, stop: str | list[str], visible: str
) -> None:
    running = start(lambda request, index: [Say(text)])
    client = running.client().chat.completions
    plain = client.create(model="m", messages=HI, stop=stop)
    chunks = list(client.create(model="m", messages=HI, stop=stop, stream=True))
    assert plain.choices[0].message.content == _texts(chunks) == visible
    assert plain.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"


def test_several_choices_run_together_and_keep_their_index(start: Start) -> None:
    def script(request: GenerationRequest, index: int) -> Sequence[Step]:
        return [Hold("all"), Say(f"choice {index}")]

    running = start(script)
    client = running.client().chat.completions
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(
            lambda: list(client.create(model="m", messages=HI, n=3, stream=True))
        )
        running.engine.wait_until_held("all", 3)
        running.engine.open_gate("all")
        chunks = answer.result()
    assert [_texts(chunks, index) for index in range(3)] == [f"choice {i}" for i in range(3)]
    plain = client.create(model="m", messages=HI, n=3)
    assert [choice.message.content for choice in plain.choices] == [f"choice {i}" for i in range(3)]
    assert plain.usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (HI_TOKENS, 24)


def test_logprobs_of_a_stream_joined_are_those_of_the_plain_answer(start: Start) -> None:
    running = start(lambda request, index: [Say("né END x")])
    client = running.client().chat.completions
    plain = client.create(
        model="m", messages=HI, logprobs=True, top_logprobs=3, stop="END"
    ).choices[0]
    chunks = list(
        client.create(
            model="m", messages=HI, logprobs=True, top_logprobs=3, stop="END", stream=True
        )
    )
    assert plain.logprobs is not None
    assert plain.logprobs.content is not None
    joined = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    assert joined == plain.logprobs.content
    assert all(len(entry.top_logprobs) == 3 for entry in joined)
    data = bytes(byte for entry in joined for byte in entry.bytes or ())
    assert data.decode() == plain.message.content == "né "


def test_sampling_fields_reach_the_engine_by_name(running: Running) -> None:
    running.client().chat.completions.create(
        model="m",
        messages=HI,
        seed=7,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=1.5,
        frequency_penalty=-2,
        logit_bias={"65": -100},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3, "unknown_field": 1},
    )
    params = running.engine.requests[-1].params
    assert (params.seed, params.temperature, params.top_p) == (7, 0.25, 0.5)
    assert (params.presence_penalty, params.frequency_penalty) == (1.5, -2.0)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.3)
    assert params.logit_bias == {65: -100.0}


def test_every_request_carries_its_own_settings(running: Running) -> None:
    client = running.client().chat.completions
    client.create(model="m", messages=HI, seed=1, stop="x", logit_bias={"1": 5})
    client.create(model="m", messages=HI)
    params = running.engine.requests[-1].params
    assert (params.seed, params.stop, params.logit_bias) == (None, (), {})


def test_tools_are_rendered_and_withheld_when_no_call_is_wanted(start: Start) -> None:
    running = start()
    running.source.template = "{{ (tools or []) | length }}" + CHATML
    tool: dict[str, object] = {"type": "function", "function": {"name": "f", "parameters": {}}}

    def first_character(**fields: object) -> str:
        running.client().chat.completions.create(
            model="m",
            messages=HI,
            tools=[tool, tool],
            **fields,
        )
        return running.tokenizer.decode(list(running.engine.requests[-1].token_ids))[0]

    assert first_character() == "1"
    assert first_character(tool_choice="auto") == "1"
    assert first_character(tool_choice="none") == "0"


def test_thinking_switches_reach_the_template(start: Start) -> None:
    running = start()
    running.source.template = "{{ enable_thinking }}|{{ reasoning_effort }}|" + CHATML
    running.client().chat.completions.create(model="m", messages=HI, reasoning_effort="low")
    ids = list(running.engine.requests[-1].token_ids)
    assert running.tokenizer.decode(ids).startswith("True|low|")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"thinking": {"type": "enabled"}}, "True|"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "False|"),
        ({"thinking": {"type": "adaptive"}}, "|"),
        ({"thinking": False}, "False|"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "True|high"),
        ({"reasoning": {"effort": "none"}}, "False|"),
        ({"reasoning": {"enabled": False}}, "False|"),
        ({"reasoning": {"summary": "auto"}}, "|"),
        ({"think": True}, "True|"),
        ({"think": "low"}, "True|low"),
        ({"think": None, "thinking": None, "reasoning": None}, "|"),
        # The first that says it counts, and on or off outranks how much.
        ({"enable_thinking": False, "thinking": {"type": "enabled"}, "think": True}, "False|"),
        ({"thinking": {"type": "disabled"}, "think": True}, "False|"),
        ({"think": False, "chat_template_kwargs": {"enable_thinking": True}}, "False|"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "True|low"),
        ({"reasoning": {"effort": "low"}, "think": "high"}, "True|low"),
        ({"reasoning": {"effort": "high"},
          "chat_template_kwargs": {"reasoning_effort": "low"}}, "True|high"),
        ({"thinking": {"type": "disabled"}, "reasoning": {"effort": "high"}}, "False|high"),
    ],
)  # fmt: skip
def test_thinking_may_be_chosen_in_the_fields_of_other_servers(
    start: Start, fields: dict[str, Any], shown: str
) -> None:
    running = start()
    running.source.template = "{{ enable_thinking }}|{{ reasoning_effort }}#" + CHATML
    running.client().chat.completions.create(model="m", messages=HI, extra_body=fields)
    ids = list(running.engine.requests[-1].token_ids)
    assert running.tokenizer.decode(ids).partition("#")[0] == shown


@pytest.mark.parametrize(
    "fields",
    [{"thinking_budget": 7}, {"reasoning": {"max_tokens": 7}},
     {"thinking": {"type": "enabled", "budget_tokens": 7}},
     {"thinking_budget": 7, "thinking": {"budget_tokens": 9}}],
)  # fmt: skip
def test_a_thinking_budget_may_be_given_in_the_fields_of_other_servers(
    running: Running, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    budgets: list[int] = []
    monkeypatch.setattr(
        "osaurus.chat.service.arm_budget", lambda budget, *_, **__: budgets.append(budget)
    )
    running.client().chat.completions.create(model="m", messages=HI, extra_body=fields)
    assert budgets == [7]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_past_thinking_is_taken_under_each_of_its_names(start: Start, name: str) -> None:
    running = start()
    running.source.template = (
        "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}" + CHATML
    )
    past: Any = {"role": "assistant", "content": "Four.", name: "Hm."}
    running.client().chat.completions.create(model="m", messages=[*HI, past, *HI])
    ids = list(running.engine.requests[-1].token_ids)
    assert running.tokenizer.decode(ids).startswith("Hm.")
    past[name] = None if name != "thinking" else [{"type": "thinking"}]  # is not text, and no harm
    running.client().chat.completions.create(model="m", messages=[*HI, past, *HI])


def test_a_flat_tool_is_shown_wrapped(start: Start) -> None:
    running = start()
    running.source.template = "{{ tools | tojson if tools }}#" + CHATML
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    flat: dict[str, Any] = {"type": "function", "name": "f", "parameters": parameters}
    wrapped = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    prompts = []
    for tool, choice in ((flat, {"type": "function", "name": "f"}), (wrapped, "auto")):
        body = {"tools": [tool], "tool_choice": choice, "max_tokens": 1}
        running.client().chat.completions.create(model="m", messages=HI, extra_body=body)
        prompts.append(list(running.engine.requests[-1].token_ids))
    assert prompts[0] == prompts[1]
    shown = json.loads(running.tokenizer.decode(prompts[0]).partition("#")[0])
    assert shown == [wrapped]


@pytest.mark.parametrize(
    "arguments", ["{", "", "not json", "[1,2]", '{"city":"Bern"}', {"city": "Bern"}]
)
def test_any_past_call_is_accepted(running: Running, arguments: object) -> None:
    messages: list[ChatCompletionMessageParam] = [
        *HI,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 C"},
        *HI,
    ]
    running.client().chat.completions.create(model="m", messages=messages)


def test_progress_is_sent_to_who_asks_and_to_nobody_else(start: Start) -> None:
    def report(completed: int) -> Emit:
        return Emit(PrefillProgress(stage="prefill", completed=completed, total=100))

    running = start(lambda request, index: [*map(report, range(0, 101, 20)), Say("x")])
    client = running.client().chat.completions
    chunks = list(
        client.create(
            model="m",
            messages=HI,
            stream=True,
            extra_body={"stream_options": {"include_progress": True}},
        )
    )
    reports = [chunk.model_extra["osaurus_prefill"] for chunk in chunks if not chunk.choices]
    assert reports
    assert all(chunk.choices for chunk in chunks[len(reports) :])
    assert chunks[len(reports)].choices[0].delta.role == "assistant"
    assert all(chunk.choices for chunk in client.create(model="m", messages=HI, stream=True))


def test_a_failure_before_the_first_token_has_a_status(start: Start) -> None:
    running = start(lambda request, index: [Fail("no room for 9 blocks", "insufficient_resources")])
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="no room for 9 blocks") as caught:
            running.client().chat.completions.create(
                model="m",
                messages=HI,
                stream=stream,
            )
        assert caught.value.status_code == 503
        assert caught.value.code == "insufficient_resources"


def test_a_failure_in_the_middle_of_a_stream_is_an_error_frame_and_an_orderly_end(
    start: Start,
) -> None:
    running = start(lambda request, index: [Say("part"), Fail("it broke")])
    with running.client().chat.completions.with_streaming_response.create(
        model="m", messages=HI, stream=True
    ) as response:
        assert response.status_code == 200
        *frames, failure, done = (line for line in response.iter_lines() if line)
    assert done == "data: [DONE]"
    error = json.loads(failure.removeprefix("data: "))["error"]
    assert error["message"] == "it broke"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "part"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    with pytest.raises(openai.InternalServerError, match="it broke"):
        running.client().chat.completions.create(model="m", messages=HI)


def test_a_silent_stream_is_kept_alive(start: Start) -> None:
    running = start(
        lambda request, index: [Hold("pinged"), Say("x")],
        config=ServerConfig(port=0, ping_interval_s=0.02),
    )
    with running.client().chat.completions.with_streaming_response.create(
        model="m", messages=HI, stream=True
    ) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line == ": ping")
        running.engine.open_gate("pinged")
        assert list(lines)[-2:] == ["data: [DONE]", ""]
