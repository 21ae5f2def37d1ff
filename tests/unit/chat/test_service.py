"""The chat engine: one code path, bounded, cancelled by closing, nothing left behind."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from api.scripted_engine import (
    Emit,
    Fail,
    Hold,
    Say,
    Script,
    ScriptedEngine,
    ScriptedSource,
    Step,
)
from osaurus.chat.service import ChatEngine
from osaurus.chat.stream import MAX_QUEUED_EVENTS
from osaurus.errors import (
    ContextLengthExceeded,
    EngineShutdown,
    InsufficientResources,
    InvalidField,
    RequestFailed,
)
from osaurus.runtime.pool import ModelRuntime
from osaurus.types.cache import CacheHints
from osaurus.types.chat import ChatRequest, Message
from osaurus.types.engine import GenerationRequest
from osaurus.types.events import Chunk, Info, PrefillProgress, Reasoning, ToolCall


def _run(script: Script, scenario: Callable[[ChatEngine, ScriptedEngine], Awaitable[None]]) -> None:
    async def bounded() -> None:
        engine = ScriptedEngine(script, max_context_tokens=200)
        chat = ChatEngine(ModelRuntime(ScriptedSource({"m": engine})))
        async with asyncio.timeout(20):
            await scenario(chat, engine)
            engine.wait_until_idle()
            assert chat.runtime.lease.snapshot() == {}
        chat.close()

    asyncio.run(bounded())


def _request(text: str = "hi", *, n: int = 1, **sampling: object) -> ChatRequest:
    return ChatRequest(
        model="m", messages=(Message(role="user", content=text),), n=n, sampling=sampling
    )


def _says(*steps: Step) -> Script:
    return lambda request, index: steps


def test_a_whole_answer_is_the_fold_of_its_stream() -> None:
    call = ToolCall(name="f", arguments={"b": 1, "a": 2})
    script = _says(Emit(Reasoning("hm")), Say("Hello"), Emit(call))

    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        (choice,) = (await chat.complete(_request())).choices
        async with await chat.open(_request()) as stream:
            events = [item.event async for item in stream]
        text = "".join(event.text for event in events if isinstance(event, Chunk))
        assert (choice.text, choice.reasoning) == (text, "hm") == ("Hello", "hm")
        assert choice.tool_calls[0].arguments_json == '{"a":2,"b":1}'
        assert choice.finish_reason == "tool_calls"
        assert events[-1] == choice.info

    _run(script, scenario)


def test_progress_is_for_streams_only() -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        async with await chat.open(_request()) as stream:
            assert isinstance((await anext(stream)).event, PrefillProgress)

    _run(_says(Say("x")), scenario)


def test_choices_run_at_the_same_time() -> None:
    def script(request: GenerationRequest, index: int) -> Sequence[Step]:
        return [Hold("all"), Say(f"answer {index}")]

    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        task = asyncio.create_task(chat.complete(_request(n=3)))
        await asyncio.to_thread(engine.wait_until_held, "all", 3)
        engine.open_gate("all")
        completion = await task
        assert [choice.text for choice in completion.choices] == [f"answer {i}" for i in range(3)]
        assert completion.usage.completion_tokens == 3 * len("answer 0")
        assert completion.usage.prompt_tokens == len(engine.requests[0].token_ids)

    _run(script, scenario)


def test_closing_a_stream_cancels_the_request_and_gives_the_lease_back() -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        async with await chat.open(_request()) as stream:
            async for item in stream:
                if isinstance(item.event, Chunk):
                    break
            assert chat.runtime.lease.count("m") == 1
        assert chat.runtime.lease.count("m") == 0

    _run(_says(Say("x"), Hold("never"), Say("y")), scenario)


def test_the_engine_is_told_what_the_prompt_says_to_the_cache() -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        request = _request("hi", n=2)
        await chat.complete(replace(request, template_kwargs={"enable_thinking": True}))
        (asked,) = engine.requests
        assert asked.cache == CacheHints(scope_salt="reasoning=on")

    _run(_says(Say("a")), scenario)


def test_cancelling_a_whole_answer_cancels_the_request() -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        task = asyncio.create_task(chat.complete(_request()))
        await asyncio.to_thread(engine.wait_until_held, "never")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _run(_says(Hold("never")), scenario)


def test_a_reader_that_stops_bounds_what_is_queued_and_still_gets_every_character() -> None:
    text = "0123456789" * 300

    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        async with await chat.open(_request(ignore_eos=True, max_tokens=199)) as stream:
            engine.wait_until_idle()
            for _ in range(50):
                await asyncio.sleep(0)
            assert stream._queue.qsize() <= MAX_QUEUED_EVENTS
            events = [item.event async for item in stream]
        received = "".join(event.text for event in events if isinstance(event, Chunk))
        assert text.startswith(received)
        assert received

    _run(_says(Say(text)), scenario)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("request_failed", RequestFailed),
        ("anything", RequestFailed),
        ("insufficient_resources", InsufficientResources),
    ],
)
def test_a_failure_of_the_engine_is_raised_after_what_came_before(
    code: str, expected: type[Exception]
) -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        received: list[str] = []

        async def read() -> None:
            async with await chat.open(_request()) as stream:
                async for item in stream:
                    if isinstance(item.event, Chunk):
                        received.append(item.event.text)

        with pytest.raises(expected, match="it broke"):
            await read()
        assert "".join(received) == "part"

    _run(_says(Say("part"), Fail("it broke", code)), scenario)


def test_an_answer_ended_by_a_shutdown_is_a_failure_not_an_answer() -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        task = asyncio.create_task(chat.complete(_request()))
        await asyncio.to_thread(engine.wait_until_held, "never")
        await chat.runtime.shut_down()
        with pytest.raises(EngineShutdown):
            await task

    _run(_says(Say("x"), Hold("never")), scenario)


def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        (choice,) = (await chat.complete(_request())).choices
        assert choice.info.prompt_tokens + choice.info.generated_tokens == 200
        assert choice.finish_reason == "length"
        (short,) = (await chat.complete(_request(max_tokens=3))).choices
        assert (short.text, short.finish_reason) == ("aaa", "length")

    _run(_says(Say("a" * 500)), scenario)


def test_a_prompt_beyond_the_context_never_reaches_the_engine() -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        with pytest.raises(ContextLengthExceeded):
            await chat.complete(_request("x" * 300))
        with pytest.raises(InvalidField):
            await chat.complete(_request(temperature=9))
        assert engine.requests == []

    _run(_says(Say("a")), scenario)


def test_every_event_stream_ends_with_its_info() -> None:
    async def scenario(chat: ChatEngine, engine: ScriptedEngine) -> None:
        async with await chat.open(_request(n=2)) as stream:
            items = [item async for item in stream]
        for index in range(2):
            events = [item.event for item in items if item.index == index]
            assert [isinstance(event, Info) for event in events].index(True) == len(events) - 1

    _run(_says(Say("ab")), scenario)
