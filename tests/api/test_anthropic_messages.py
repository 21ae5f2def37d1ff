"""`/v1/messages` through the real `anthropic` client: plain, streamed, tools, thinking, counts.

Field cases F07, F09, F11 and F45 in Anthropic's form; the scripted engine says what a model says,
everything above it is the real thing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest

from api.conftest import Running, Start
from api.scripted_engine import (
    ByteTokenizer,
    Emit,
    Fail,
    Hold,
    Say,
    ScriptedEngine,
    ScriptedSource,
    Step,
)
from api.test_tool_calls import BERN, OSLO, WRITE_NOTE, _conventions  # the same model's words
from osaurus.runtime.conventions import Conventions
from osaurus.server.serve import ServerConfig
from osaurus.types.engine import GenerationRequest
from osaurus.types.events import Chunk, Info, PrefillProgress, Reasoning, ToolCall

TEMPLATES = Path(__file__).parents[1] / "golden" / "templates"

ASK: list[Any] = [{"role": "user", "content": "What is two plus two?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Looks at the sky.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
NOTE: dict[str, Any] = {
    "name": "note",
    "input_schema": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    },
}
SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search"}


@dataclass
class Server:
    """A server whose model "m" says what `text` holds, with the vendor's client for it."""

    running: Running
    source: ScriptedSource
    client: anthropic.Anthropic
    says: list[Step] = field(default_factory=list)

    def says_text(self, text: str) -> None:
        self.says[:] = [Say(text)]

    def ask(self, text: str | None = None, **fields: Any) -> anthropic.types.Message:
        if text is not None:
            self.says_text(text)
        return self.client.messages.create(**_body(fields))

    def stream(self, text: str | None = None, **fields: Any) -> anthropic.types.Message:
        """What the client's own accumulator makes of the stream."""
        if text is not None:
            self.says_text(text)
        with self.client.messages.stream(**_body(fields)) as stream:
            return stream.get_final_message()

    def events(self, text: str | None = None, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
        """The stream as it goes over the wire."""
        if text is not None:
            self.says_text(text)
        body = {**_body(fields), "stream": True}
        response = httpx2.post(f"{self.running.url}/v1/messages", json=body, timeout=30)
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = [frame.split("\n") for frame in response.text.split("\n\n") if frame]
        return [
            (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
            for name, data in frames
        ]

    def count(self, **fields: Any) -> int:
        body = _body(fields)
        del body["max_tokens"]
        return self.client.messages.count_tokens(**body).input_tokens

    def prompt(self) -> str:
        (engine,) = self.source.engines.values()
        return self.source.tokenizer.decode(list(engine.requests[-1].token_ids))


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 1000, "messages": ASK, **fields}
    return {key: value for key, value in body.items() if value is not None}


def _serve(
    start: Start,
    conventions: Conventions | None = None,
    *,
    template: str = "json",
    config: ServerConfig | None = None,
    max_context_tokens: int = 1 << 20,
) -> Server:
    says: list[Step] = []

    def script(request: GenerationRequest, index: int) -> Sequence[Step]:
        return list(says)

    source = ScriptedSource(
        {"m": ScriptedEngine(script, max_context_tokens=max_context_tokens)},
        tokenizer=ByteTokenizer(others=("<think>", "</think>")),
        template=(TEMPLATES / f"{template}.jinja").read_text(),
        conventions={"m": conventions or _conventions()},
    )
    running = start(source=source, config=config)
    client = running.stack.enter_context(_client(running))
    return Server(running, source, client, says)


def _client(running: Running, **options: Any) -> anthropic.Anthropic:
    options = {"max_retries": 0, "timeout": 30, "_strict_response_validation": True, **options}
    return anthropic.Anthropic(base_url=running.url, api_key="none", **options)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key for signatures is made under it."""
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))


@pytest.fixture
def server(start: Start) -> Server:
    return _serve(start)


def _texts(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def _calls(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def _extra(model: Any, name: str) -> Any:
    return (model.model_extra or {}).get(name)


def test_a_plain_answer_has_the_published_shape(server: Server) -> None:
    message = server.ask("Four.")
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "m")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Four."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == server.count()
    assert message.usage.output_tokens == len("Four.")
    assert (message._request_id or "").startswith("req_")


def test_a_stream_has_the_published_events(server: Server) -> None:
    events = server.events("Four.")
    assert [name for name, _ in events] == [payload["type"] for _, payload in events]
    names = [name for name, _ in events if name != "content_block_delta"]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == (
        [],
        None,
        0,
    )
    assert start["usage"]["input_tokens"] == server.count()
    delta = dict(events)["message_delta"]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len("Four.")


def test_plain_and_streamed_answers_are_the_same(server: Server) -> None:
    for text in ("Four.", "<think>So.</think>Four. " + BERN + OSLO, "", "<think>So"):
        plain: dict[str, Any] = server.ask(text, tools=[WEATHER]).to_dict()
        streamed: dict[str, Any] = server.stream(text, tools=[WEATHER]).to_dict()
        for message in (plain, streamed):
            message.pop("id")
            message.pop("osaurus", None)
            message.pop("stop_details", None)  # of the accumulator's own
            for block in message["content"]:
                block.pop("id", None)
                block.pop("parsed_output", None)
        assert plain == streamed


def test_the_async_client_reads_the_same(server: Server) -> None:
    server.says_text("<think>So.</think>Four. " + BERN)

    async def ask() -> tuple[Any, Any, int]:
        async with anthropic.AsyncAnthropic(
            base_url=server.running.url, api_key="none", max_retries=0
        ) as client:
            fields: dict[str, Any] = {"model": "m", "messages": ASK, "tools": [WEATHER]}
            plain = await client.messages.create(max_tokens=1000, **fields)
            async with client.messages.stream(max_tokens=1000, **fields) as stream:
                pieces = [piece async for piece in stream.text_stream]
                streamed = await stream.get_final_message()
            assert "".join(pieces) == "Four. "
            return plain, streamed, (await client.messages.count_tokens(**fields)).input_tokens

    plain, streamed, count = asyncio.run(ask())
    for message in (plain, streamed):
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use"]
        assert message.usage.input_tokens == count


def test_thinking_is_a_signed_block_and_comes_back_as_thinking(server: Server) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = server.ask("<think>Two and two.</think>Four.", thinking=thinking)
    block = message.content[0]
    assert block.type == "thinking"
    assert (block.thinking, bool(block.signature)) == ("Two and two.", True)
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens > 0
    streamed = server.stream("<think>Two and two.</think>Four.", thinking=thinking).content[0]
    assert streamed.to_dict() == block.to_dict()
    history = [*ASK, {"role": "assistant", "content": message.content}, *ASK]
    assert server.ask("Still four.", messages=history).stop_reason == "end_turn"


def test_thinking_that_shall_not_be_shown_is_a_signature(server: Server) -> None:
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    text = "<think>Two and two.</think>Four."
    for message in (server.ask(text, thinking=thinking), server.stream(text, thinking=thinking)):
        block, answer = message.content
        assert block.type == "thinking"
        assert (block.thinking, bool(block.signature)) == ("", True)
        assert answer.to_dict()["text"] == "Four."


@pytest.mark.parametrize(
    ("thinking", "is_closed"), [("enabled", False), ("adaptive", False), ("disabled", True)]
)
def test_thinking_is_turned_on_and_off(server: Server, thinking: str, is_closed: bool) -> None:
    budget = {"budget_tokens": 1024} if thinking == "enabled" else {}
    server.ask("Four.", thinking={"type": thinking, **budget})
    assert server.prompt().endswith("<think>\n\n</think>\n\n") is is_closed


def test_a_tool_is_called_answered_and_the_answer_told(server: Server) -> None:
    for ask in (server.ask, server.stream):
        call = ask("<think>Look.</think>One moment. " + BERN + OSLO, tools=[WEATHER])
        assert call.stop_reason == "tool_use"
        assert _calls(call) == [
            ("get_weather", {"city": "Bern"}),
            ("get_weather", {"city": "Oslo"}),
        ]
        first, second = (block for block in call.content if block.type == "tool_use")
        assert first.id.startswith("toolu_")
        assert first.id != second.id
        picture = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        results = [
            {"type": "tool_result", "tool_use_id": first.id, "content": "12 C"},
            {
                "type": "tool_result",
                "tool_use_id": second.id,
                "is_error": True,
                "content": [{"type": "text", "text": "no sensor"}, picture],
            },
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
        ]
        messages = [
            *ASK,
            {"role": "assistant", "content": call.content},
            {"role": "user", "content": results},
        ]
        answer = server.ask("12 C in Bern.", tools=[WEATHER], messages=messages)
        assert _texts(answer) == "12 C in Bern."
        prompt = server.prompt()
        places = [
            prompt.index(text) for text in ("One moment.", "12 C", "Error: no sensor", "And?")
        ]
        assert places == sorted(places)
        assert "image left out" in prompt


def test_f11_a_choice_of_tool_is_kept_to(server: Server) -> None:
    tools = [WEATHER, NOTE]
    for ask in (server.ask, server.stream):
        none = ask("Four. " + BERN, tools=tools, tool_choice={"type": "none"})
        assert (_calls(none), none.stop_reason) == ([], "end_turn")
        assert _texts(none) == "Four. "
        auto = ask("Four.", tools=tools, tool_choice={"type": "auto"})
        assert _texts(auto) == "Four."
        some = ask("So. " + BERN, tools=tools, tool_choice={"type": "any"})
        assert (_calls(some), some.stop_reason) == ([("get_weather", {"city": "Bern"})], "tool_use")
        named = ask(BERN + WRITE_NOTE, tools=tools, tool_choice={"type": "tool", "name": "note"})
        assert _calls(named) == [("note", {"text": "four"})]
        single = {"type": "auto", "disable_parallel_tool_use": True}
        assert len(_calls(ask(BERN + OSLO, tools=tools, tool_choice=single))) == 1
        for choice in ({"type": "any"}, {"type": "tool", "name": "note"}):
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                ask("Four.", tools=tools, tool_choice=choice)
        for choice, offered in (
            ({"type": "tool", "name": "absent"}, tools),
            ({"type": "any"}, None),
            ({"type": "sometimes"}, tools),
        ):
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                ask("Four.", tools=offered, tool_choice=choice)


def test_f09_a_call_cut_by_the_limit_is_no_call(server: Server) -> None:
    whole = len(BERN.encode())
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "any"}}
    for ask in (server.ask, server.stream):
        cut = ask(BERN, max_tokens=12, **fields)
        assert (cut.stop_reason, cut.content) == ("max_tokens", [])
        both = ask(BERN + OSLO, max_tokens=whole + 12, **fields)
        assert both.stop_reason == "max_tokens"
        assert _calls(both) == [("get_weather", {"city": "Bern"})]
    assert server.events(BERN, max_tokens=12, **fields)[-1][0] == "message_stop"


def test_what_ended_the_answer_is_said(server: Server) -> None:
    for ask in (server.ask, server.stream):
        stopped = ask("One END two", stop_sequences=["STOP", "END"])
        assert (_texts(stopped), stopped.stop_reason) == ("One ", "stop_sequence")
        assert stopped.stop_sequence == "END"
        cut = ask("One two", max_tokens=3)
        assert (_texts(cut), cut.stop_reason) == ("One", "max_tokens")


def test_an_answer_that_was_begun_is_continued(server: Server) -> None:
    begun = [*ASK, {"role": "assistant", "content": "Two plus two is "}]
    assert _texts(server.ask("four.", messages=begun)) == "four."
    assert server.prompt().endswith("Two plus two is ")
    assert server.count(messages=begun) == server.ask("4", messages=begun).usage.input_tokens


def _counted() -> dict[str, Any]:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern"}}
    return {
        "tools": [WEATHER, NOTE],
        "messages": [
            *ASK,
            {"role": "assistant", "content": [call]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 C"}],
            },
        ],
    }


@pytest.mark.parametrize(
    "system", ["Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]]
)
def test_f07_a_count_is_that_of_the_request(server: Server, system: Any) -> None:
    body = {"model": "m", **_counted(), "system": system}
    response = httpx2.post(
        f"{server.running.url}/v1/messages/count_tokens?beta=true", json=body, timeout=30
    )
    assert response.status_code == 200
    assert set(response.json()) == {"input_tokens"}
    assert server.source.loads == []  # neither was it loaded
    (engine,) = server.source.engines.values()
    assert engine.requests == []
    count = response.json()["input_tokens"]
    assert type(count) is int
    for _ in range(2):
        usage = server.ask("Four.", **_counted(), system=system, max_tokens=1).usage
        read, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert count == usage.input_tokens + (read or 0) + (made or 0)
    assert server.count(**_counted(), system=system) == count
    for fields in ({"thinking": {"type": "disabled"}}, {"tool_choice": {"type": "none"}}):
        usage = server.ask("Four.", **_counted(), **fields).usage
        assert server.count(**_counted(), **fields) == usage.input_tokens


def test_f07_counts_are_given_while_the_model_is_busy(start: Start) -> None:
    config = ServerConfig(port=0, drain_s=0.2, inference_limit=1)
    server = _serve(start, config=config)
    server.says[:] = [Hold("gate"), Say("Four.")]
    (engine,) = server.source.engines.values()

    async def scenario() -> None:
        async with anthropic.AsyncAnthropic(
            base_url=server.running.url, api_key="none", max_retries=0
        ) as client:
            fields: dict[str, Any] = {"model": "m", "messages": ASK}
            asking = asyncio.create_task(client.messages.create(max_tokens=9, **fields))
            await asyncio.to_thread(engine.wait_until_held, "gate")
            count = (await client.messages.count_tokens(**fields)).input_tokens
            with pytest.raises(anthropic.APIStatusError) as refused:
                await client.messages.create(max_tokens=9, **fields)
            assert (refused.value.status_code, refused.value.type) == (503, "overloaded_error")
            assert refused.value.response.headers["retry-after"] == "1"
            engine.open_gate("gate")
            assert (await asking).usage.input_tokens == count

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["no_such_thing", "batches", "batches/b_1/results"])
def test_f07_unknown_paths_are_404_in_the_protocols_form(server: Server, path: str) -> None:
    for method in ("GET", "POST"):
        url = f"{server.running.url}/v1/messages/{path}"
        response = httpx2.request(method, url, json={}, timeout=30)
        assert response.status_code == 404
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    with pytest.raises(anthropic.NotFoundError):
        server.client.messages.batches.list()


def test_f45_the_input_side_is_split_by_where_it_came_from(server: Server) -> None:
    total = server.count()

    def cached_answer(request: GenerationRequest, index: int) -> Sequence[Step]:
        ahead = PrefillProgress(stage="cache_lookup", completed=32, total=total, detail="paged")
        info = Info(prompt_tokens=total, cached_prompt_tokens=32, generated_tokens=7)
        return [Emit(ahead), Emit(Chunk("Four.")), Emit(info)]

    (engine,) = server.source.engines.values()
    engine.script = cached_answer
    for usage in (server.ask().usage, server.stream().usage):
        assert usage.cache_read_input_tokens == 32
        assert usage.input_tokens == total - 32
        assert usage.cache_creation_input_tokens == 0
        assert usage.output_tokens == 7
    events = dict(server.events())
    start = events["message_start"]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (total - 32, 32)
    assert events["message_delta"]["usage"]["output_tokens"] == 7


def test_f45_thinking_and_call_tokens_count(server: Server) -> None:
    text = "<think>Hm.</think>So. " + BERN
    generated = 2 + len("Hm.So. " + BERN)  # the marks are a token each
    for ask in (server.ask, server.stream):
        server.says[:] = [Say("So. " + BERN)]
        assert ask(tools=[WEATHER]).usage.output_tokens == len("So. " + BERN)
        assert ask(text, tools=[WEATHER]).usage.output_tokens >= generated


def test_errors_are_typed_and_have_a_status(start: Start) -> None:
    server = _serve(start, max_context_tokens=200)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        server.ask(model="claude-nobody")
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id is not None
    assert unknown.value.request_id == unknown.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError) as long:
        server.ask(messages=[{"role": "user", "content": "x" * 300}])
    assert long.value.type == "invalid_request_error"
    body: Any = long.value.body
    assert body["type"] == "error"
    assert body["error"]["message"].startswith("prompt is too long: ")
    assert " tokens > 200 maximum" in body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        server.ask(max_tokens=0)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    mixed = [{"type": "text", "text": "what is this?"}, image]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\].*text only"):
        server.ask(messages=[{"role": "user", "content": mixed}])
    lost = {"type": "tool_result", "tool_use_id": "toolu_9", "content": "?"}
    turn = {"role": "user", "content": [{"type": "text", "text": "so?"}, lost]}
    for call in (server.ask, server.count):
        with pytest.raises(anthropic.BadRequestError, match=r"\[0\]\.content\[1\]\.tool_use_id"):
            call(messages=[turn], system="s")


def test_max_tokens_is_needed_to_answer_and_not_to_count(server: Server) -> None:
    body = {"model": "m", "messages": ASK}
    url = f"{server.running.url}/v1/messages"
    response = httpx2.post(url, json=body, timeout=30)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "max_tokens: is required"
    assert httpx2.post(f"{url}/count_tokens", json=body, timeout=30).status_code == 200


def test_an_error_before_the_first_output_has_a_status_and_after_it_an_event(
    server: Server,
) -> None:
    server.says[:] = [Fail("the device is gone")]
    for ask in (server.ask, server.stream):
        with pytest.raises(anthropic.InternalServerError) as failed:
            ask()
        assert failed.value.type == "api_error"
    server.says[:] = [Say("Fo"), Fail("the device is gone")]
    with pytest.raises(anthropic.APIStatusError) as broken:
        server.stream()
    assert (broken.value.status_code, broken.value.type) == (200, "api_error")
    *before, (name, payload) = server.events()
    assert (name, payload["type"]) == ("error", "error")
    assert payload["error"] == {"type": "api_error", "message": "the device is gone"}
    assert "message_stop" not in dict(before)


def test_silence_is_filled_with_pings(start: Start) -> None:
    config = ServerConfig(port=0, drain_s=0.2, ping_interval_s=0.05)
    server = _serve(start, config=config)
    (engine,) = server.source.engines.values()
    server.says[:] = [Hold("gate"), Say("Four.")]
    body = {**_body({}), "stream": True}
    pings = 0
    lines: list[str] = []
    with httpx2.stream("POST", f"{server.running.url}/v1/messages", json=body) as response:
        for line in response.iter_lines():
            lines.append(line)
            pings += line == "event: ping"
            if pings == 3:
                engine.open_gate("gate")
    assert lines[0:2] == ["event: ping", 'data: {"type":"ping"}']
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    others = [name for name in names if name != "ping"]
    assert (others[0], others[-1]) == ("message_start", "message_stop")


def test_a_client_that_goes_away_ends_its_answer(server: Server) -> None:
    server.says[:] = [Say("Fo"), Hold("never")]
    (engine,) = server.source.engines.values()
    with server.client.messages.stream(**_body({})) as stream:
        for event in stream:
            if event.type == "text":
                break
    engine.wait_until_idle()
    server.says_text("Four.")
    assert _texts(server.ask()) == "Four."


def test_ten_thousand_pieces_arrive_in_order(server: Server) -> None:
    pieces = [f"{number} " for number in range(10_000)]
    server.says[:] = [Emit(Chunk(piece)) for piece in pieces]
    assert _texts(server.stream()) == "".join(pieces)


def test_interleaved_thinking_text_and_calls_keep_their_order(server: Server) -> None:
    call = ToolCall(name="get_weather", arguments={"city": "B" * 2000})
    server.says[:] = [
        *map(Emit, (Reasoning("a"), Chunk("b"), Reasoning("c"), Chunk("\n"), call, call)),
        Emit(Chunk("d")),
    ]
    for message in (server.ask(tools=[WEATHER]), server.stream(tools=[WEATHER])):
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "thinking", "tool_use", "tool_use", "text"]
        assert _calls(message) == [("get_weather", {"city": "B" * 2000})] * 2


def test_a_tool_that_anthropic_runs_is_left_out_and_said(server: Server) -> None:
    message = server.ask("Four.", tools=[SEARCH, WEATHER])
    (note,) = _extra(message, "osaurus")["notes"]
    assert "web_search_20250305" in note
    assert "web_search" not in server.prompt()
    assert "get_weather" in server.prompt()
    delta = dict(server.events("Four.", tools=[SEARCH]))["message_delta"]
    assert "web_search_20250305" in delta["osaurus"]["notes"][0]


def test_what_claude_code_sends_is_answered(server: Server) -> None:
    """Billing line, cache marks everywhere, metadata, adaptive thinking, effort, betas."""
    mark = {"cache_control": {"type": "ephemeral"}}
    billing = "x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch=1;"
    server.says_text("Hello.")
    body: dict[str, Any] = dict(
        model="m",
        max_tokens=32000,
        betas=["interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"],
        system=[
            {"type": "text", "text": billing},
            {"type": "text", "text": "You help with code.", **mark},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>x</system-reminder>\n"},
                    {"type": "text", "text": "hello", **mark},
                ],
            }
        ],
        tools=[{**WEATHER, **mark}],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        extra_body={"context_management": {"edits": []}, "temperature": 1},
        extra_headers={"x-claude-code-session-id": "s"},
    )
    message = server.client.beta.messages.create(**body)
    assert message.stop_reason == "end_turn"
    assert "billing" not in server.prompt()
    assert "You help with code." in server.prompt()


def test_any_version_is_served_and_what_is_none_is_a_400(server: Server) -> None:
    server.says_text("Four.")
    url = f"{server.running.url}/anthropic/v1/messages"
    for version in (None, "2023-06-01", "2031-12-31"):
        headers = {} if version is None else {"anthropic-version": version}
        response = httpx2.post(url, json=_body({}), headers=headers, timeout=30)
        assert response.status_code == 200
        assert response.headers["request-id"] == response.headers["x-request-id"]
    for path in ("/messages", "/messages/count_tokens", "/models"):
        method = "GET" if path == "/models" else "POST"
        response = httpx2.request(
            method,
            f"{server.running.url}/v1{path}",
            json=_body({}),
            headers={"anthropic-version": "latest"},
            timeout=30,
        )
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_bound_on_thinking_is_a_rule_only_where_it_is_asked_for(server: Server) -> None:
    rules: list[Any] = []

    def script(request: GenerationRequest, index: int) -> Sequence[Step]:
        assert request.make_rule is not None
        rules.append(request.make_rule())
        return [Say("Four.")]

    (engine,) = server.source.engines.values()
    engine.script = script
    server.ask(thinking={"type": "enabled", "budget_tokens": 1024})
    server.ask(extra_body={"thinking_budget": 8})
    assert rules[0] is None
    assert rules[1] is not None


def test_models_are_listed_in_pages(start: Start) -> None:
    names = [f"org/model-{number}" for number in range(5)]
    source = ScriptedSource({name: ScriptedEngine() for name in names})
    with _client(start(source=source)) as client:
        page = client.models.list(limit=2)
        assert [model.id for model in page.data] == names[:2]
        assert (page.has_more, page.first_id, page.last_id) == (True, names[0], names[1])
        assert [model.id for model in client.models.list(limit=2)] == names
        before = client.models.list(limit=2, before_id=names[3])
        assert [model.id for model in before.data] == names[1:3]
        assert before.has_more
        one = client.models.retrieve(names[4])
        assert (one.type, one.display_name, one.lifecycle) == ("model", "model-4", "active")
        assert (one.created_at.year, one.max_input_tokens) == (2026, 4096)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.models.retrieve("nobody")
        assert unknown.value.type == "not_found_error"
        for wrong in ({"limit": 0}, {"after_id": "x"}, {"after_id": "a", "before_id": "b"}):
            with pytest.raises(anthropic.BadRequestError):
                client.models.list(**wrong)  # pyright: ignore[reportArgumentType]


def test_openais_clients_still_get_openais_list(server: Server) -> None:
    listed = server.running.client().models.list()
    assert [(model.id, model.object) for model in listed.data] == [("m", "model")]
