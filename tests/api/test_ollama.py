"""Ollama's chat and generate through the real `ollama` clients, sync and async, whole and
streamed, on a scripted engine. Field cases F09, F39 and F45 in Ollama's form."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import ollama
import pytest

from api.conftest import SEVERAL, Running, Start
from api.ollama_rig import WAYS, Way, ask
from api.scripted_engine import (
    ByteTokenizer,
    Emit,
    Fail,
    Hold,
    Say,
    Script,
    ScriptedEngine,
    ScriptedSource,
    Step,
)
from api.test_tool_calls import BERN, NOTE, OSLO, TEMPLATES, WEATHER, _conventions
from osaurus.server.serve import ServerConfig
from osaurus.types.engine import GenerationRequest
from osaurus.types.events import Info, PrefillProgress, Reasoning, ToolCall

HI: list[Any] = [{"role": "user", "content": "hi"}]
each_way = pytest.mark.parametrize("way", WAYS)


def _says(*steps: Step | str) -> Script:
    found = [Say(step) if isinstance(step, str) else step for step in steps]
    return lambda request, index: found


def _thinker(start: Start, script: Script) -> Running:
    """A model that thinks between tags and writes JSON calls."""
    source = ScriptedSource(
        {"m": ScriptedEngine(script, max_context_tokens=1 << 20)},
        tokenizer=ByteTokenizer(others=("<think>", "</think>")),
        template=(TEMPLATES / "json.jinja").read_text(),
        conventions={"m": _conventions()},
    )
    return start(source=source)


def _prompt(running: Running) -> str:
    return running.tokenizer.decode(list(running.engine.requests[-1].token_ids))


@each_way
def test_a_chat_is_answered(running: Running, way: Way) -> None:
    answer = ask(running, way, model="m", messages=HI)
    assert answer.text == "Hello!"
    assert answer.last.done_reason == "stop"
    assert answer.last.model == "m"
    assert answer.last.eval_count == 6
    assert answer.last.prompt_eval_count == len(running.engine.requests[-1].token_ids)
    assert answer.last.eval_duration == 500_000_000
    assert answer.last.prompt_eval_duration == 100_000_000
    assert answer.last.total_duration >= answer.last.load_duration > 0
    assert answer.calls == []
    assert answer.thinking == ""


@each_way
def test_a_prompt_is_gone_on_from_as_a_users_message(running: Running, way: Way) -> None:
    answer = ask(running, way, "generate", model="m", prompt="hi", system="Be brief.")
    assert answer.text == "Hello!"
    assert answer.last.done_reason == "stop"
    assert answer.last.eval_count == 6
    assert _prompt(running) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_lines_are_streamed_unless_told_otherwise(running: Running) -> None:
    body = {"model": "m", "messages": HI}
    streamed = httpx2.post(f"{running.url}/api/chat", json=body)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert len(lines) > 1
    for line in lines[:-1]:
        assert line["message"]["role"] == "assistant"
        assert isinstance(line["message"]["content"], str)
        assert not line["done"]
        assert "eval_count" not in line
    whole = httpx2.post(f"{running.url}/api/chat", json={**body, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"]["content"] == "Hello!"


@each_way
def test_thinking_is_never_in_the_content_even_when_it_was_not_wanted(
    start: Start, way: Way
) -> None:
    running = _thinker(start, _says("<think>two and two</think>Four."))
    for think in (None, True, False, "high"):
        answer = ask(running, way, model="m", messages=HI, think=think)
        assert (answer.thinking, answer.text) == ("two and two", "Four.")


@pytest.mark.parametrize(
    ("think", "expected"), [(True, (True, None)), (False, (False, None)), ("low", (None, "low"))]
)
def test_think_reaches_the_template(start: Start, think: Any, expected: Any) -> None:
    template = (
        "{{ enable_thinking }}/{{ reasoning_effort }}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    source = ScriptedSource(
        {"m": ScriptedEngine()},
        template=template,
        conventions={"m": _conventions(model_type="gptoss" if think == "low" else "qwen3")},
    )
    running = start(source=source)
    ask(running, "plain", model="m", messages=HI, think=think)
    shown = _prompt(running).removesuffix("hi").split("/")
    enable, effort = expected
    if enable is not None:
        assert shown[0] == str(enable)
    if effort is not None:
        assert shown[1] == effort


@each_way
def test_parallel_calls_are_objects_in_one_line(start: Start, way: Way) -> None:
    running = _thinker(start, _says(f"Wait.{BERN}{OSLO}"))
    answer = ask(running, way, model="m", messages=HI, tools=[WEATHER, NOTE])
    assert answer.calls == [("get_weather", {"city": "Bern"}), ("get_weather", {"city": "Oslo"})]
    assert sum(bool(line.message.tool_calls) for line in answer.lines) == 1
    assert answer.text == "Wait."
    assert answer.last.done_reason == "stop"


def test_a_call_has_an_id_and_a_place_for_clients_that_want_them(start: Start) -> None:
    running = _thinker(start, _says(BERN + OSLO))
    body = {"model": "m", "messages": HI, "tools": [WEATHER], "stream": False}
    calls = httpx2.post(f"{running.url}/api/chat", json=body).json()["message"]["tool_calls"]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert calls[0]["id"] != calls[1]["id"]
    assert calls[0]["function"]["arguments"] == {"city": "Bern"}


@each_way
def test_f09_a_call_cut_by_the_limit_is_left_out_and_the_whole_one_before_it_stays(
    start: Start, way: Way
) -> None:
    text = BERN + '<tool_call>{"name": "note", "arguments": {"text": "' + 400 * "x"
    running = _thinker(start, _says(text))
    for limit, calls in ((12, []), (len(BERN) + 60, [("get_weather", {"city": "Bern"})])):
        answer = ask(
            running,
            way,
            model="m",
            messages=HI,
            tools=[WEATHER, NOTE],
            options={"num_predict": limit},
        )
        assert answer.last.done_reason == "length"
        assert answer.calls == calls
        assert answer.text == ""
        assert answer.last.eval_count == limit


HISTORY: list[Any] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "thinking": "I must look.",
        "tool_calls": [
            {"function": {"name": "get_weather", "arguments": {"city": "Bern"}}},
            {"function": {"name": "note", "arguments": {"text": "x"}}},
            {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
        ],
    },
]
_TELLING = "{% for m in messages %}[{{ m.role }}|{{ m.tool_call_id }}|{{ m.content }}]{% endfor %}"


def test_a_result_answers_the_first_open_call_to_the_tool_it_names(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()}, template=_TELLING)
    running = start(source=source)
    results = [
        {"role": "tool", "tool_name": "note", "content": "kept"},
        {"role": "tool", "name": "get_weather", "content": "12 C"},
        {"role": "tool", "content": "3 C"},
    ]
    body = {"model": "m", "messages": [*HISTORY, *results], "tools": [WEATHER, NOTE]}
    response = httpx2.post(f"{running.url}/api/chat", json=body)
    assert response.status_code == 200, response.text
    assert (
        "[tool|call_1_note|kept][tool|call_0_get_weather|12 C][tool|call_2_get_weather|3 C]"
        in _prompt(running)
    )


def test_a_result_may_name_its_call_by_id(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()}, template=_TELLING)
    running = start(source=source)
    calls = [
        {"id": f"c{i}", "function": {"name": "get_weather", "arguments": {"city": city}}}
        for i, city in enumerate(("Bern", "Oslo"))
    ]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "tool_name": "get_weather", "content": "3 C"},
        {"role": "tool", "tool_name": "get_weather", "content": "12 C"},
    ]
    body = {"model": "m", "messages": messages, "tools": [WEATHER]}
    assert httpx2.post(f"{running.url}/api/chat", json=body).status_code == 200
    assert "[tool|c1|3 C][tool|c0|12 C]" in _prompt(running)


@each_way
def test_options_become_sampling_values(running: Running, way: Way) -> None:
    options = {
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 7,
        "min_p": 0.05,
        "seed": 11,
        "num_predict": 4,
        "repeat_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repeat_last_n": 32,
        "stop": ["END"],
        "num_ctx": 1_000_000,
        "num_keep": 5,
        "num_gpu": 3,
        "mirostat": 2,
    }
    answer = ask(running, way, model="m", messages=HI, options=options)
    assert (answer.text, answer.last.done_reason) == ("Hell", "length")
    params = running.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.8, 7, 0.05)
    assert (params.seed, params.max_tokens, params.penalty_window) == (11, 4, 32)
    assert params.repetition_penalty == 1.3
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.stop == ("END",)


def test_options_that_stand_for_none_leave_the_defaults(running: Running) -> None:
    options = {"num_predict": -1, "seed": -1, "repeat_last_n": -1, "top_k": 0, "stop": None}
    ask(running, "plain", model="m", messages=HI, options=options)
    params = running.engine.requests[-1].params
    ask(running, "plain", model="m", messages=HI)
    assert params == running.engine.requests[-1].params
    assert params.penalty_window is None
    assert params.seed is None


def test_no_tokens_back_means_no_penalties(running: Running) -> None:
    options = {"repeat_last_n": 0, "repeat_penalty": 1.5, "frequency_penalty": 1.0}
    ask(running, "plain", model="m", messages=HI, options=options)
    assert not running.engine.requests[-1].params.has_penalties


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"frequency_penalty": 2.5}, "options.frequency_penalty"),
        ({"presence_penalty": -3}, "options.presence_penalty"),
        ({"temperature": "hot"}, "options.temperature"),
        ({"temperature": True}, "options.temperature"),
        ({"top_p": 1.1}, "options.top_p"),
        ({"top_k": 1.5}, "options.top_k"),
        ({"repeat_penalty": -1}, "options.repeat_penalty"),
        ({"repetition_penalty": 11}, "options.repetition_penalty"),
        ({"num_predict": "many"}, "options.num_predict"),
        ({"num_predict": 1.5}, "options.num_predict"),
        ({"num_predict": 10**30}, "options.num_predict"),
        ({"repeat_last_n": []}, "options.repeat_last_n"),
        ({"num_ctx": 0}, "options.num_ctx"),
        ({"num_ctx": "8k"}, "options.num_ctx"),
        ({"seed": 2**70}, "options.seed"),
        ({"stop": 5}, "options.stop"),
        ({"stop": ["a", 5]}, "options.stop"),
        ({"stop": ["a"] * 17}, "options.stop"),
        ([], "options"),
    ],
)
def test_f39_a_wrong_option_is_refused_by_its_name(
    running: Running, options: Any, field: str
) -> None:
    for path, ask_for in (("chat", {"messages": HI}), ("generate", {"prompt": "hi"})):
        body = {"model": "m", "options": options, **ask_for}
        response = httpx2.post(f"{running.url}/api/{path}", json=body)
        assert response.status_code == 400
        assert response.json()["error"].startswith(f"{field}:"), response.text
    assert running.engine.requests == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "user", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": "hi"}, "messages"),
        ({"messages": HI, "think": "loudly"}, "think"),
        ({"messages": HI, "think": 3}, "think"),
        ({"messages": HI, "format": "xml"}, "format"),
        ({"messages": HI, "format": 5}, "format"),
        ({"messages": HI, "stream": "yes"}, "stream"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0]"),
        ({"messages": HI, "keep_alive": "soon"}, "keep_alive"),
        ({"messages": [{"role": "tool", "content": "12 C"}]}, "messages[0].tool_call_id"),
    ],
)
def test_a_bad_field_is_named_in_ollamas_form(running: Running, fields: Any, field: str) -> None:
    response = httpx2.post(f"{running.url}/api/chat", json={"model": "m", **fields})
    assert response.status_code == 400
    (error,) = response.json().values()
    assert error.startswith(f"{field}:"), error


def test_pictures_for_generate_are_refused(running: Running) -> None:
    body = {"model": "m", "prompt": "What is it?", "images": ["aGk="]}
    response = httpx2.post(f"{running.url}/api/generate", json=body)
    assert response.status_code == 400
    assert response.json()["error"].startswith("images: ")


def test_a_picture_that_a_tool_gave_becomes_a_note(start: Start) -> None:
    running = start(source=ScriptedSource({"m": ScriptedEngine()}, template=_TELLING))
    result = {"role": "tool", "tool_name": "note", "content": "see ", "images": ["aGk="]}
    body = {"model": "m", "messages": [*HISTORY, result], "tools": [WEATHER, NOTE]}
    assert httpx2.post(f"{running.url}/api/chat", json=body).status_code == 200
    assert "see [image left out" in _prompt(running)


@each_way
def test_logprobs_come_with_their_text_and_alternatives(running: Running, way: Way) -> None:
    for what, prompt in (("chat", {"messages": HI}), ("generate", {"prompt": "hi"})):
        answer = ask(running, way, what, model="m", logprobs=True, top_logprobs=2, **prompt)
        assert "".join(token for token, _, _ in answer.logprobs) == "Hello!"
        assert answer.logprobs[0] == ("H", -0.5, ["H", "I"])
        plain = ask(running, way, what, model="m", **prompt)
        assert plain.logprobs == []


@each_way
def test_an_unknown_model_is_a_404(running: Running, way: Way) -> None:
    for what, prompt in (("chat", {"messages": HI}), ("generate", {"prompt": "hi"})):
        with pytest.raises(ollama.ResponseError) as caught:
            ask(running, way, what, model="nope", **prompt)
        assert caught.value.status_code == 404
        assert "'nope' not found" in caught.value.error


@pytest.mark.parametrize("way", ["streamed", "async streamed"])
def test_an_error_in_the_middle_is_a_line(start: Start, way: Way) -> None:
    running = start(_says("Hel", Fail("the device is gone")))
    with pytest.raises(ollama.ResponseError, match="the device is gone"):
        ask(running, way, model="m", messages=HI)
    response = httpx2.post(f"{running.url}/api/chat", json={"model": "m", "messages": HI})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert response.status_code == 200
    assert "".join(line["message"]["content"] for line in lines[:-1]) == "Hel"
    assert lines[-1] == {"error": "the device is gone"}
    assert not any(line["done"] for line in lines[:-1])


@pytest.mark.parametrize("way", ["plain", "async plain"])
def test_an_error_in_a_whole_answer_has_a_status(start: Start, way: Way) -> None:
    running = start(_says("Hel", Fail("the device is gone")))
    with pytest.raises(ollama.ResponseError) as caught:
        ask(running, way, model="m", messages=HI)
    assert (caught.value.error, caught.value.status_code) == ("the device is gone", 500)


@each_way
def test_a_prompt_over_the_context_names_both_numbers(start: Start, way: Way) -> None:
    running = start(max_context_tokens=64)
    long = [{"role": "user", "content": "x" * 100}]
    with pytest.raises(ollama.ResponseError) as caught:
        ask(running, way, model="m", messages=long)
    assert caught.value.status_code == 400
    assert "tokens > 64 maximum" in caught.value.error


@each_way
def test_a_hard_stream_keeps_its_order(start: Start, way: Way) -> None:
    """Progress, thinking in pieces, a call, then ten thousand characters."""
    steps: list[Step] = [
        Emit(PrefillProgress(stage="prefill", completed=1, total=9)),
        Emit(Reasoning("a")),
        Emit(Reasoning("b")),
        Emit(ToolCall(name="get_weather", arguments={"city": "Bern"})),
    ]
    text = "0123456789" * 1000
    running = start(_says(*steps, text), max_context_tokens=1 << 20)
    answer = ask(running, way, model="m", messages=HI, tools=[WEATHER])
    assert answer.thinking == "ab"
    assert answer.text == text
    assert answer.calls == [("get_weather", {"city": "Bern"})]


def test_a_client_that_goes_away_cancels_its_request(start: Start) -> None:
    running = start(lambda request, index: [Say("x"), Hold("never"), Say("y")])
    body = {"model": "m", "messages": HI}
    with (
        httpx2.Client(timeout=5) as client,
        client.stream("POST", f"{running.url}/api/chat", json=body) as response,
    ):
        assert b"x" in next(response.iter_raw())
    running.engine.wait_until_idle()
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{running.url}/api/chat", json={**body, "stream": False}, timeout=0.5)
    running.engine.wait_until_idle()


def test_streams_run_side_by_side(start: Start) -> None:
    running = start(lambda request, index: [Say("x"), Hold("go"), Say("y")])
    with ThreadPoolExecutor(8) as threads:
        answers = [
            threads.submit(ask, running, WAYS[i % 4], model="m", messages=HI) for i in range(8)
        ]
        running.engine.wait_until_held("go", 8)
        running.engine.open_gate("go")
        assert [answer.result().text for answer in answers] == ["xy"] * 8


def test_nothing_but_the_model_is_asked_for_without_messages(running: Running) -> None:
    with ollama.Client(running.url) as client:
        assert client.ps().models == []
        loaded = client.generate("m", keep_alive="5m")
        assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
        assert [one.model for one in client.ps().models] == ["m"]
        (line,) = client.chat("m", [], stream=True)
        assert (line.done_reason, line.message.content) == ("load", "")
        assert client.chat("m", [], keep_alive=0).done_reason == "unload"
        pause = threading.Event()
        while client.ps().models:
            pause.wait(0.01)
    assert running.engine.requests == []


def test_keep_alive_zero_with_messages_answers_and_unloads(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()}, make_engine=lambda _: ScriptedEngine())
    running = start(source=source)
    for count in (1, 2):
        answer = ask(running, WAYS[count], model="m", messages=HI, keep_alive=0)
        assert answer.text == "Hello!"
        pause = threading.Event()
        while len(source.freed) < count:
            pause.wait(0.01)


@each_way
def test_f45_counts_are_the_engines_plain_and_streamed(start: Start, way: Way) -> None:
    def script(request: GenerationRequest, index: int) -> Sequence[Step]:
        cached = 0 if len(running.engine.requests) == 1 else 512
        return [
            Emit(Reasoning("hm")),
            Say("four"),
            Emit(
                Info(
                    prompt_tokens=len(request.token_ids),
                    cached_prompt_tokens=cached,
                    generated_tokens=31,
                    reasoning_tokens=12,
                )
            ),
        ]

    running = start(script)
    empty = ask(running, way, model="m", messages=[{"role": "user", "content": ""}])
    text = "x" * (800 - empty.last.prompt_eval_count)
    for _ in range(2):
        answer = ask(running, way, model="m", messages=[{"role": "user", "content": text}])
        assert answer.last.prompt_eval_count == 800
        assert answer.last.eval_count == 31


def test_a_name_may_have_ollamas_tag(running: Running) -> None:
    answer = ask(running, "streamed", model="m:latest", messages=HI)
    assert answer.text == "Hello!"
    assert {line.model for line in answer.lines} == {"m:latest"}


def test_every_prefix_leads_to_it(running: Running) -> None:
    for prefix in ("", "/api", "/v1", "/v1/api"):
        body = {"model": "m", "messages": HI, "stream": False}
        answer = httpx2.post(f"{running.url}{prefix}/chat", json=body)
        assert answer.json()["message"]["content"] == "Hello!"


def test_what_is_said_beside_the_answer_stands_in_its_last_line(start: Start) -> None:
    running = _thinker(start, _says("<think>and then"))
    body = {"model": "m", "messages": HI}
    lines = httpx2.post(f"{running.url}/api/chat", json=body).text.splitlines()
    assert json.loads(lines[-1])["osaurus"]["unclosed_reasoning"] is True
    assert all("osaurus" not in json.loads(line) for line in lines[:-1])


def test_an_answer_goes_on_where_the_last_message_ends(start: Start) -> None:
    running = start()
    said: Any = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Once"}]
    for way in WAYS:
        assert ask(running, way, model="m", messages=said).text == "Hello!"
        prompt = running.tokenizer.decode(running.engine.requests[-1].token_ids)
        assert prompt.endswith("<|im_start|>assistant\nOnce")
    ask(running, "plain", model="m", messages=[said[0], {"role": "assistant", "content": ""}])
    prompt = running.tokenizer.decode(running.engine.requests[-1].token_ids)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_page_that_anybody_may_have_written_asks_but_does_not_unload(start: Start) -> None:
    config = ServerConfig(port=0, drain_s=0.2, runtime=SEVERAL, cors_origins=("*",))
    running = start(config=config)
    said = {"model": "m", "messages": [{"role": "user", "content": "u"}], "stream": False}
    page = {"Origin": "https://any.example"}
    url = f"{running.url}/api/chat"
    assert httpx2.post(url, json=said, headers=page).json()["message"]["content"] == "Hello!"
    unload = {"model": "m", "keep_alive": 0}
    assert httpx2.post(url, json=unload, headers=page).status_code == 403
    assert httpx2.get(f"{running.url}/health").json()["loaded"] == ["m"]
    own = httpx2.post(url, json=unload, headers={"Origin": "http://localhost:3000"})
    assert own.json()["done_reason"] == "unload"
