"""Open Responses through the real `openai` client, judged by two sets of types.

Field cases F03, F19 and F45 on `/responses`. Every response and event that passes here is
checked against the published document as well (`responses_oracle.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import openresponses_types.types as published
import pytest
from pydantic import BaseModel

from api.conftest import SEVERAL, Running, Start
from api.scripted_engine import (
    CHATML,
    ByteTokenizer,
    Fail,
    Hold,
    Say,
    ScriptedEngine,
    ScriptedSource,
    Step,
)
from osaurus.parsing.selection import FormatChoice
from osaurus.runtime.conventions import Conventions
from osaurus.server.serve import ServerConfig
from osaurus.types.engine import GenerationRequest
from responses_oracle import check_response, check_stream

THINKS = Conventions(
    formats=FormatChoice(
        tool_format="json", tool_origin="stamp", reasoning="think", reasoning_origin="stamp"
    )
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
BERN = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
OSLO = BERN.replace("Bern", "Oslo")

CALLS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Server:
    """A server whose model says `steps`."""

    def __init__(self, start: Start, *, template: str = CALLS_TEMPLATE, **config: Any) -> None:
        self.steps: Sequence[Step] = [Say("Hello!")]

        def script(request: GenerationRequest, index: int) -> Sequence[Step]:
            return self.steps

        engines = {name: ScriptedEngine(script, max_context_tokens=1 << 16) for name in "mo"}
        source = ScriptedSource(
            engines,
            tokenizer=ByteTokenizer(others=("<think>", "</think>")),
            template=template,
            conventions={"m": THINKS},
        )
        settings: dict[str, Any] = {"port": 0, "drain_s": 0.2, "runtime": SEVERAL, **config}
        self.running: Running = start(config=ServerConfig(**settings), source=source)
        self.engine = engines["m"]
        self.source = source
        self.client = self.running.stack.enter_context(
            openai.OpenAI(
                base_url=f"{self.running.url}/v1",
                api_key="none",
                max_retries=0,
                timeout=30,
                _strict_response_validation=True,
            )
        )

    def ask(self, say: str | Sequence[Step] | None = None, **fields: Any) -> Any:
        self._say(say)
        fields = {"model": "m", "input": "What?", **fields}
        response = self.client.responses.create(**fields)
        check_response(response.model_dump(mode="json"))
        return response

    def stream(self, say: str | Sequence[Step] | None = None, **fields: Any) -> list[Any]:
        """Checked as the client saw it, which must have understood each event."""
        self._say(say)
        fields = {"model": "m", "input": "What?", **fields}
        events = list(self.client.responses.create(stream=True, **fields))
        check_stream(self.raw(**fields)[0])
        return events

    def raw(self, **fields: Any) -> tuple[list[dict[str, Any]], str]:
        fields = {"model": "m", "input": "What?", "stream": True, **fields}
        answer = httpx2.post(f"{self.running.url}/v1/responses", json=fields, timeout=30)
        assert answer.status_code == 200, answer.text
        return sse_events(answer.text), answer.text

    def refused(self, **fields: Any) -> dict[str, Any]:
        fields = {"model": "m", "input": "What?", **fields}
        answer = httpx2.post(f"{self.running.url}/v1/responses", json=fields, timeout=30)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def prompt(self, model: str = "m") -> str:
        request = self.source.engines[model].requests[-1]
        return self.source.tokenizer.decode(list(request.token_ids))

    def _say(self, say: str | Sequence[Step] | None) -> None:
        if say is not None:
            self.steps = [Say(say)] if isinstance(say, str) else say


def sse_events(text: str) -> list[dict[str, Any]]:
    frames = [frame for frame in text.split("\n\n") if frame.startswith("event: ")]
    events: list[dict[str, Any]] = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture
def server(start: Start) -> Server:
    return Server(start)


def _kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


# Answers.


def test_a_plain_answer_is_one_message(server: Server) -> None:
    answer = server.ask(instructions="Be brief.", metadata={"a": "b"}, user="u")
    assert answer.output_text == "Hello!"
    assert answer.status == "completed"
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (
        6,
        answer.usage.input_tokens + 6,
    )
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "Be brief.")
    assert server.prompt().startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_a_stream_says_what_the_plain_answer_says(server: Server) -> None:
    say = f"<think>Let me see.</think>Two calls.{BERN}{OSLO}"
    plain = server.ask(say, tools=[WEATHER])
    final = server.stream(say, tools=[WEATHER])[-1].response
    assert _kinds(plain) == ["reasoning", "message", "function_call", "function_call"]
    assert _kinds(final) == _kinds(plain)
    assert final.output_text == plain.output_text == "Two calls."
    assert final.usage == plain.usage
    assert plain.usage.output_tokens == len(say)
    assert plain.usage.output_tokens_details.reasoning_tokens > 0
    assert plain.output[0].summary[0].text == "Let me see."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Bern"}, {"city": "Oslo"}]
    assert len({call.call_id for call in calls}) == 2
    assert "city" not in plain.output_text


def test_thinking_that_resumes_after_text_is_a_new_item(server: Server) -> None:
    events = server.stream("<think>a</think>b<think>c</think>d")
    assert _kinds(events[-1].response) == ["reasoning", "message", "reasoning", "message"]


@pytest.mark.parametrize(
    ("limit", "kinds", "last"),
    [
        (3, ["message"], "incomplete"),  # what might have begun a marker is text
        (7, [], None),  # behind the marker
        (10, ["reasoning"], "incomplete"),
        (24, ["reasoning", "message"], "incomplete"),
        (60, ["reasoning", "message"], "incomplete"),  # inside a call
    ],
)
def test_a_length_cut_in_each_place_is_incomplete(
    server: Server, limit: int, kinds: list[str], last: str | None
) -> None:
    say = f"<think>abcdefg</think>Some text.{BERN}"
    events = server.stream(say, tools=[WEATHER], max_output_tokens=limit)
    final = events[-1].response
    assert events[-1].type == "response.incomplete"
    assert final.incomplete_details.reason == "max_output_tokens"
    assert final.usage.output_tokens == limit
    assert _kinds(final) == kinds
    if last:
        assert final.output[-1].status == last


def test_stop_strings_end_an_answer_and_are_not_in_it(server: Server) -> None:
    assert server.ask("one two three", extra_body={"stop": [" three"]}).output_text == "one two"
    assert server.ask("one two", extra_body={"stop": ["o"]}).output == []


def test_ten_thousand_pieces_arrive_in_order(server: Server) -> None:
    text = "".join(f"{i} " for i in range(2000))
    assert server.stream(text, max_output_tokens=20_000)[-1].response.output_text == text


def test_the_helpers_of_the_client_work(server: Server) -> None:
    class City(BaseModel):
        city: str

    server._say(f"Text.{BERN}")
    with server.client.responses.stream(
        model="m", input="?", tools=[openai.pydantic_function_tool(City, name="get_weather")]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert final.output[-1].type == "function_call"
    assert final.output[-1].parsed_arguments == City(city="Bern")


def test_the_async_client_works(server: Server) -> None:
    async def ask() -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.running.url}/v1",
            api_key="none",
            max_retries=0,
            _strict_response_validation=True,
        ) as client:
            plain = await client.responses.create(model="m", input="?")
            async with client.responses.stream(
                model="m", input="?", previous_response_id=plain.id
            ) as stream:
                async for _ in stream:
                    pass
                streamed = await stream.get_final_response()
            again = await client.responses.retrieve(plain.id)
            items = [item async for item in client.responses.input_items.list(streamed.id)]
            assert len(items) == 3
            await client.responses.delete(plain.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(plain.id)
            return plain.output_text, streamed.output_text, again.output_text

    assert asyncio.run(ask()) == ("Hello!", "Hello!", "Hello!")


# What a request may say.


def test_logprobs_come_when_asked_for(server: Server) -> None:
    none = server.ask("ab")
    assert none.output[0].content[0].logprobs == []
    events = server.stream("ab", include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    part = events[-1].response.output[0].content[0]
    assert [one.token for e in deltas for one in e.logprobs] == ["a", "b"]
    assert [(one.token, len(one.top_logprobs)) for one in part.logprobs] == [("a", 2), ("b", 2)]
    assert events[-1].response.top_logprobs == 2


def test_sampling_values_reach_the_engine_and_are_said_back(server: Server) -> None:
    answer = server.ask(
        temperature=0.3,
        top_p=0.7,
        max_output_tokens=99,
        extra_body={"top_k": 5, "seed": 7, "presence_penalty": 0.5},
    )
    params = server.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.3, 0.7, 5, 7)
    assert (params.max_tokens, params.presence_penalty) == (99, 0.5)
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.3, 0.7, 99)


def test_the_models_own_sampling_values_are_said_where_the_request_has_none(start: Start) -> None:
    engine = ScriptedEngine()
    running = start(source=ScriptedSource({"m": engine}, sampling_defaults={"temperature": 0.25}))
    events, _ = Server.raw(_served(running), model="m")
    assert events[-1]["response"]["temperature"] == 0.25


def _served(running: Running) -> Server:
    server = Server.__new__(Server)
    server.running = running
    return server


def test_tools_of_other_types_are_left_out_with_a_note(server: Server) -> None:
    answer = server.ask(BERN, tools=[{"type": "web_search"}, WEATHER])
    assert [tool.name for tool in answer.tools] == ["get_weather"]
    assert answer.output[0].type == "function_call"
    assert "web_search" in answer.osaurus["notes"][0]


def test_a_choice_of_tools_is_kept_to(server: Server) -> None:
    other = {**WEATHER, "name": "other"}
    tools = [WEATHER, other]
    forced = server.ask(BERN, tools=tools, tool_choice={"type": "function", "name": "get_weather"})
    assert forced.tool_choice.name == "get_weather"
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "other"}],
    }
    answer = server.ask("No.", tools=tools, tool_choice=allowed)
    assert answer.tool_choice.mode == "auto"
    assert "[other]" in server.prompt()
    assert "[get_weather]" not in server.prompt()
    assert server.ask(BERN, tools=tools, tool_choice="none").output == []
    two = server.ask(BERN + OSLO, tools=tools, parallel_tool_calls=False)
    assert _kinds(two) == ["function_call"]
    events, _ = server.raw(tools=tools, tool_choice="required")
    assert check_stream(events)["status"] == "completed"


def test_a_required_call_that_is_not_made_fails(server: Server) -> None:
    server._say("Just text.")
    refused = server.refused(tools=[WEATHER], tool_choice="required")
    assert (refused["code"], refused["param"]) == ("tool_choice_unsatisfied", "tool_choice")
    events, _ = server.raw(tools=[WEATHER], tool_choice="required")
    assert check_stream(events)["error"]["type"] == "tool_choice_unsatisfied"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"model": None}, "model"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "x"}, {"type": "function", "name": 3}]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "poem"}}}, "text.format.type"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": "much"}, "reasoning"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": ""}]},
            "input[0].call_id",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
                ]
            },
            "input[0].content",
        ),
    ],
)
def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    assert server.refused(**fields)["param"] == param


def test_a_prompt_longer_than_the_context_is_refused(server: Server) -> None:
    for is_stream in (False, True):
        refused = server.refused(input="x" * 70_000, stream=is_stream)
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")


def test_how_much_to_think_reaches_the_template(start: Start) -> None:
    shown = "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    server = Server(start, template=CALLS_TEMPLATE + shown)
    answer = server.ask(reasoning={"effort": "none", "summary": "auto"})
    assert (answer.reasoning.effort, answer.reasoning.summary) == ("none", "auto")
    assert server.prompt().endswith("[False]")
    server.ask(reasoning={"effort": "high"})
    assert server.prompt().endswith("[True]")


def test_tool_output_may_be_a_list_of_parts_and_hold_a_picture(server: Server) -> None:
    def thread(output: Any) -> list[dict[str, Any]]:
        call = {
            "type": "function_call",
            "call_id": "call_a",
            "name": "get_weather",
            "arguments": '{"city":"Bern"}',
        }
        result = {"type": "function_call_output", "call_id": "call_a", "output": output}
        return [{"role": "user", "content": "Weather?"}, call, result]

    parts = [{"type": "input_text", "text": "12 C, "}, {"type": "input_text", "text": "dry"}]
    whole = server.ask("ok", input=thread("12 C, dry"))
    split = server.ask("ok", input=thread(parts))
    assert split.usage.input_tokens == whole.usage.input_tokens
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    seen = server.ask("ok", input=thread([*parts, picture]))
    assert "12 C, dry[image left out" in server.prompt()
    assert server.ask("still fine", previous_response_id=seen.id).output_text == "still fine"


@pytest.mark.parametrize("arguments", ["{", "", "not json", "[1,2]", '{"city": "Bern"}'])
def test_malformed_arguments_in_the_history_are_no_error(server: Server, arguments: str) -> None:
    def thread(value: Any) -> list[dict[str, Any]]:
        call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": value}
        result = {"type": "function_call_output", "call_id": "c", "output": "12 C"}
        return [{"role": "user", "content": "?"}, call, result, {"role": "user", "content": "So?"}]

    counted = server.ask("ok", input=thread(arguments)).usage.input_tokens
    same = {'{"city": "Bern"}': '{"city":"Bern"}', "": "{}"}
    if arguments in same:
        assert counted == server.ask("ok", input=thread(same[arguments])).usage.input_tokens


# Going on, reading back.


def test_a_conversation_goes_on_from_a_response(server: Server) -> None:
    first = server.ask(
        f"<think>hm</think>Let me look.{BERN}",
        tools=[WEATHER],
        instructions="First.",
        input="Weather?",
    )
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}
    server.ask("It is 12 C.", input=[result], previous_response_id=first.id, instructions="Second.")
    prompt = server.prompt()
    assert "First." not in prompt
    assert prompt.startswith("<|im_start|>system\nSecond.")
    assert "user\nWeather?<|im_end|>" in prompt
    assert '<think>hm</think>Let me look.<tool_call>get_weather {"city": "Bern"}' in prompt
    assert "tool\n12 C<|im_end|>" in prompt


def test_another_model_can_go_on_from_it(server: Server) -> None:
    first = server.ask("I am m.")
    server.ask(input="And you?", model="o", previous_response_id=first.id)
    assert "I am m." in server.prompt("o")


def test_a_response_may_be_gone_on_from_twice_at_once(server: Server) -> None:
    root = server.ask("Root.")
    left = server.ask("Left.", previous_response_id=root.id, input="l?")
    right = server.ask("Right.", previous_response_id=root.id, input="r?")
    server.ask(previous_response_id=left.id)
    assert "Left." in server.prompt()
    assert "Right." not in server.prompt()
    server.ask(previous_response_id=right.id)
    assert "Left." not in server.prompt()


def test_what_is_not_stored_cannot_be_gone_on_from(server: Server) -> None:
    gone = server.ask(store=False)
    assert gone.store is False
    refused = server.refused(previous_response_id=gone.id)
    assert refused["code"] == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        server.client.responses.retrieve(gone.id)


def test_items_are_referred_to_by_their_ids(server: Server) -> None:
    first = server.ask("<think>deep</think>Forty-two.", input="Meaning?")
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    server.ask(input=[*references, {"role": "user", "content": "Why?"}])
    assert "<think>deep</think>Forty-two." in server.prompt()


def test_stateless_clients_send_every_item_back(server: Server) -> None:
    first = server.ask(
        f"<think>hm</think>Look.{BERN}",
        tools=[WEATHER],
        store=False,
        include=["reasoning.encrypted_content"],
    )
    items = [item.model_dump(exclude_none=True) for item in first.output]
    call_id = first.output[-1].call_id
    result = {"type": "function_call_output", "call_id": call_id, "output": "12 C"}
    server.ask("Done.", input=[{"role": "user", "content": "What?"}, *items, result], store=False)
    assert "<think>hm</think>Look.<tool_call>" in server.prompt()


def test_a_stored_response_is_read_back_as_it_was(server: Server) -> None:
    answer = server.ask(metadata={"k": "v"})
    assert server.client.responses.retrieve(answer.id) == answer
    streamed = server.stream("Again")[-1].response
    assert server.client.responses.retrieve(streamed.id) == streamed
    with pytest.raises(openai.BadRequestError, match="stream"):
        list(server.client.responses.retrieve(answer.id, stream=True))


def test_a_deleted_response_is_gone(server: Server) -> None:
    answer = server.ask()
    server.client.responses.delete(answer.id)
    for call in (
        server.client.responses.retrieve,
        server.client.responses.delete,
        server.client.responses.cancel,
        server.client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(answer.id)
        assert caught.value.code == "response_not_found"


def test_input_items_are_listed_in_pages(server: Server) -> None:
    first = server.ask(input=[{"role": "user", "content": str(i)} for i in range(5)])
    second = server.ask(previous_response_id=first.id, input="last")

    def texts(order: str, limit: int) -> list[str]:
        pages = server.client.responses.input_items.list(second.id, order=order, limit=limit)
        return [item.content[0].text for item in pages]

    wanted = ["0", "1", "2", "3", "4", "Hello!", "last"]
    assert texts("asc", 2) == wanted
    assert texts("desc", 100) == wanted[::-1]
    assert len(server.client.responses.input_items.list(second.id, limit=3).data) == 3
    for bad in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_x"}):
        with pytest.raises(openai.BadRequestError):
            server.client.responses.input_items.list(second.id, **bad)


def test_a_compacted_conversation_keeps_what_was_said_to_the_model(server: Server) -> None:
    first = server.ask(f"<think>hm</think>Look.{BERN}", tools=[WEATHER], input="Weather?")
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12 C"}
    second = server.ask("It is 12 C.", input=[result], previous_response_id=first.id)
    server.steps = [Say("  It is 12 C in Bern.\n")]
    compacted = httpx2.post(
        f"{server.running.url}/v1/responses/compact",
        json={"model": "m", "previous_response_id": second.id},
    ).json()
    published.CompactResource.model_validate(compacted)
    kinds = [item["type"] for item in compacted["output"]]
    assert kinds == ["message", "compaction"]
    assert compacted["usage"]["output_tokens"] == len("  It is 12 C in Bern.\n")
    assert "tool\n12 C" in server.prompt()  # the summary was made from all of it
    server.ask("Fine.", input=[*compacted["output"], {"role": "user", "content": "And now?"}])
    prompt = server.prompt()
    assert "user\nWeather?<|im_end|>" in prompt
    assert "Summary of the conversation so far:\nIt is 12 C in Bern.<|im_end|>" in prompt
    assert "get_weather" not in prompt


def test_a_compaction_of_another_server_is_left_out_with_a_note(server: Server) -> None:
    for content in ("gAAAA", "osaurus.summary.1.%%%"):
        foreign = {"type": "compaction", "encrypted_content": content}
        answer = server.ask(input=[foreign, {"role": "user", "content": "Hi"}])
        assert "compaction" in answer.osaurus["notes"][0]


def test_an_empty_summary_is_an_error(server: Server) -> None:
    server.steps = [Say(" ")]
    with pytest.raises(openai.InternalServerError, match="no summary"):
        server.client.responses.compact(model="m", input="Hi")


def test_input_tokens_are_counted_as_a_real_request_counts_them(server: Server) -> None:
    first = server.ask("Yes.", input="Weather?")
    fields: dict[str, Any] = {
        "model": "m",
        "input": [{"role": "user", "content": "So?"}],
        "instructions": "Be brief.",
        "tools": [WEATHER],
        "previous_response_id": first.id,
    }
    num_requests = len(server.engine.requests)
    count = server.client.responses.input_tokens.count(**fields)
    assert len(server.engine.requests) == num_requests
    assert count.input_tokens == server.ask("ok", **fields).usage.input_tokens


def test_a_coding_agents_turns_go_round(server: Server) -> None:
    """As Codex sends them: nothing stored, tools of its own kinds, every item said again."""
    shell = {
        "type": "function",
        "name": "shell",
        "description": "Runs a command",
        "strict": False,
        "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
    }
    fields: dict[str, Any] = {
        "instructions": "You are a coding agent.",
        "tools": [shell, {"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "text": {"verbosity": "low"},
        "client_metadata": {"x": "y"},
    }
    text = {"type": "input_text", "text": "<environment>linux</environment>"}
    thread: list[Any] = [
        {"type": "message", "role": "developer", "content": [text]},
        {"type": "message", "role": "user", "content": [{**text, "text": "List the files"}]},
    ]
    call = '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'
    server.steps = [Say(f"<think>ls</think>{call}")]
    events, _ = server.raw(input=thread, **fields)
    final = check_stream(events)
    assert final["text"]["verbosity"] == "low"
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    reasoning, called = done
    assert called["arguments"] == '{"command":["ls"]}'
    thread += [
        {"type": "reasoning", "summary": reasoning["summary"], "encrypted_content": None},
        {key: called[key] for key in ("type", "name", "arguments", "call_id")},
        {"type": "function_call_output", "call_id": called["call_id"], "output": "a.py"},
    ]
    server.steps = [Say("One file.")]
    assert check_stream(server.raw(input=thread, **fields)[0])["status"] == "completed"
    prompt = server.prompt()
    assert '<think>ls</think><tool_call>shell {"command": ["ls"]}</tool_call>' in prompt
    assert "tool\na.py<|im_end|>" in prompt


# Errors, cancels, silence.


def test_an_error_in_the_middle_is_a_failed_response(server: Server) -> None:
    server.steps = [Say("Partly"), Fail("the device fell over")]
    events, text = server.raw()
    final = check_stream(events)
    assert final["status"] == "failed"
    assert final["error"]["code"] == "server_error"
    assert final["output"][0]["status"] == "incomplete"
    assert text.endswith("data: [DONE]\n\n")
    assert server.client.responses.retrieve(final["id"]).status == "failed"
    with pytest.raises(openai.InternalServerError, match="fell over"):
        server.ask()


def test_a_silent_prompt_is_kept_alive_and_a_late_failure_is_a_whole_stream(start: Start) -> None:
    server = Server(start, ping_interval_s=0.05)
    server.steps = [Hold("prefill"), Say("Hello!")]
    with httpx2.stream(
        "POST",
        f"{server.running.url}/v1/responses",
        json={"model": "m", "input": "?", "stream": True},
        timeout=30,
    ) as answer:
        lines = answer.iter_lines()
        while next(lines) != ": ping":
            pass
        server.engine.open_gate("prefill")
        assert "data: [DONE]" in list(lines)
    # A model that fails to load after the first ping.
    server.source.failures["o"] = RuntimeError("broken")
    server.source.gates["o"] = gate = threading.Event()
    with httpx2.stream(
        "POST",
        f"{server.running.url}/v1/responses",
        json={"model": "o", "input": "?", "stream": True},
        timeout=30,
    ) as answer:
        text = ""
        for piece in answer.iter_text():
            text += piece
            gate.set()
    final = check_stream(sse_events(text))
    assert final["status"] == "failed"
    assert text.endswith("data: [DONE]\n\n")


def test_a_running_stream_is_cancelled_by_its_id(server: Server) -> None:
    server.steps = [Say("Once"), Hold("long"), Say(" more")]
    stream = server.client.responses.create(model="m", input="?", stream=True)
    events = [next(stream)]
    server.engine.wait_until_held("long")
    cancelled = server.client.responses.cancel(events[0].response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text == "Once"
    events += list(stream)
    final = check_stream([event.model_dump(mode="json", exclude_unset=True) for event in events])
    assert (events[-1].type, final["status"]) == ("response.incomplete", "cancelled")
    server.engine.wait_until_idle()
    assert server.client.responses.cancel(final["id"]).status == "cancelled"
    again = server.ask("Yes.", previous_response_id=final["id"])
    assert again.output_text == "Yes."


def test_streams_cancelled_and_left_at_any_moment_leave_nothing_behind(server: Server) -> None:
    server.steps = [Say("<think>hm</think>" + "word " * 400 + BERN)]

    def run(number: int) -> None:
        client = server.running.client()
        stream = client.responses.create(
            model="m", input="?", stream=True, tools=[WEATHER], max_output_tokens=4000
        )
        events: list[Any] = []
        for event in stream:
            events.append(event)
            if len(events) == 7 * number + 1:
                if number % 3 == 0:
                    stream.close()
                    return
                if number % 3 == 1:
                    with contextlib.suppress(openai.BadRequestError):  # it may have ended
                        client.responses.cancel(events[0].response.id)
        check_stream([event.model_dump(mode="json", exclude_unset=True) for event in events])

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(run, range(24)))
    server.engine.wait_until_idle()

    def is_idle() -> bool:
        health = httpx2.get(f"{server.running.url}/health").json()
        return health["inflight"] == {} and health["http_inflight"] == 0

    _until(is_idle)


def test_what_has_ended_cannot_be_cancelled(server: Server) -> None:
    answer = server.ask()
    with pytest.raises(openai.BadRequestError, match="completed"):
        server.client.responses.cancel(answer.id)


def test_a_client_that_goes_away_cancels_its_response(server: Server) -> None:
    server.steps = [Say("Once"), Hold("long"), Say(" more")]
    stream = server.client.responses.create(model="m", input="?", stream=True)
    response_id = next(stream).response.id
    server.engine.wait_until_held("long")
    stream.close()
    server.engine.wait_until_idle()
    _until(lambda: server.client.responses.retrieve(response_id).status == "cancelled")


def test_a_response_in_the_background_is_polled(server: Server) -> None:
    server.steps = [Say("<think>hm</think>A"), Hold("slow"), Say("t last.")]
    begun = server.ask(background=True)
    assert (begun.status, begun.output) == ("queued", [])
    server.engine.wait_until_held("slow")
    _until(lambda: _kinds(server.client.responses.retrieve(begun.id)) == ["reasoning"])
    assert server.client.responses.retrieve(begun.id).status == "in_progress"
    assert "has not ended" in server.refused(previous_response_id=begun.id)["message"]
    server.engine.open_gate("slow")
    _until(lambda: server.client.responses.retrieve(begun.id).status == "completed")
    ended = server.client.responses.retrieve(begun.id)
    check_response(ended.model_dump(mode="json"))
    assert (ended.output_text, ended.background) == ("At last.", True)


def test_a_background_response_is_cancelled_at_any_stage(server: Server) -> None:
    gate = server.source.gates["o"] = threading.Event()
    loading = server.ask(background=True, model="o")
    assert server.client.responses.cancel(loading.id).status == "cancelled"
    gate.set()
    server.steps = [Say("a"), Hold("never"), Say("b")]
    running = server.ask(background=True)
    server.engine.wait_until_held("never")
    assert server.client.responses.cancel(running.id).output_text == "a"
    server.engine.wait_until_idle()
    deleted = server.ask(background=True)
    server.engine.wait_until_held("never")
    server.client.responses.delete(deleted.id)
    server.engine.wait_until_idle()


def test_a_background_failure_is_in_the_response(server: Server) -> None:
    failed = server.ask([Say("a"), Fail("broken")], background=True)
    _until(lambda: server.client.responses.retrieve(failed.id).status == "failed")
    assert server.client.responses.retrieve(failed.id).error.message == "broken"
    unknown = server.ask(background=True, model="nobody")
    _until(lambda: server.client.responses.retrieve(unknown.id).status == "failed")


def test_a_full_server_says_so_before_anything_begins(start: Start) -> None:
    server = Server(start, inference_limit=1)
    server.steps = [Hold("slow"), Say("x")]
    begun = server.ask(background=True)
    with pytest.raises(openai.InternalServerError) as caught:
        server.ask(background=True)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    server.client.responses.cancel(begun.id)
    _until(lambda: server.ask([Say("free")]).output_text == "free")


def test_many_at_once_do_not_mix(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, name: str) -> bool:
        first = await client.responses.create(model="m", input=name)
        second = await client.responses.create(
            model="m", input="again", previous_response_id=first.id
        )
        texts = [
            item.content[0].text
            async for item in client.responses.input_items.list(second.id, order="asc")
        ]
        return texts == [name, "Hello!", "again"]

    async def run() -> list[bool]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.running.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client, f"q{i}") for i in range(16)))

    assert all(asyncio.run(run()))


def test_a_chatml_model_without_thinking_or_tools_answers_too(start: Start) -> None:
    server = Server(start, template=CHATML)
    assert server.ask(model="o").output_text == "Hello!"


def _until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
