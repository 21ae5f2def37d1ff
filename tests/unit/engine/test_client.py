"""Claims: the engine's thread never waits for a consumer; a slow consumer loses no text; a
stream that is dropped cancels, one that ended does not."""

from __future__ import annotations

import asyncio
import gc
import threading

from osaurus.engine.client import Mailbox, Stream
from osaurus.types.events import Chunk, Info, PrefillProgress, Reasoning, TokenLogprob, ToolCall

DONE = Info(prompt_tokens=1)


def _logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, text="", data=b"", logprob=0.0)


def _progress(done: int) -> PrefillProgress:
    return PrefillProgress(stage="prefill", completed=done, total=9)


def test_unread_neighbours_merge_and_calls_stay_whole() -> None:
    box = Mailbox()
    call = ToolCall(name="f", arguments={})
    for event in (
        _progress(1),
        _progress(2),
        Reasoning("a"),
        Reasoning("b"),
        Chunk("c", (_logprob(1),)),
        Chunk("d", (_logprob(2),)),
        call,
        call,
        Chunk("e"),
        DONE,
    ):
        box.put(event)
    stream = Stream("r", box, lambda: None)
    assert list(stream) == [
        _progress(2),
        Reasoning("ab"),
        Chunk("cd", (_logprob(1), _logprob(2))),
        call,
        call,
        Chunk("e"),
        DONE,
    ]


def test_a_consumer_that_stops_reading_holds_one_event_however_much_is_written() -> None:
    box = Mailbox()
    for _ in range(10_000):
        box.put(Chunk("x"))
    assert box.take_now() == Chunk("x" * 10_000)
    assert box.take_now() is None


def test_async_consumers_are_woken_from_another_thread() -> None:
    box = Mailbox()

    async def read() -> list[object]:
        stream = Stream("r", box, lambda: None)
        writer = threading.Thread(target=lambda: [box.put(e) for e in (Chunk("a"), DONE)])
        events: list[object] = []
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)  # the task now waits for the mailbox
        writer.start()
        events.append(await task)
        events += [event async for event in stream]
        writer.join()
        return events

    events = asyncio.run(read())
    assert events[-1] == DONE
    assert "".join(e.text for e in events if isinstance(e, Chunk)) == "a"


def test_writing_to_a_loop_that_closed_is_harmless() -> None:
    box = Mailbox()

    async def wait_briefly() -> None:
        task = asyncio.ensure_future(box.take_async())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(wait_briefly())
    box.put(DONE)
    assert box.take_now() == DONE


def test_dropping_a_stream_cancels_it_and_dropping_a_finished_one_does_not() -> None:
    cancelled: list[str] = []
    unread = Stream("unread", Mailbox(), lambda: cancelled.append("unread"))
    del unread
    gc.collect()
    closed = Stream("closed", Mailbox(), lambda: cancelled.append("closed"))
    closed.close()
    box = Mailbox()
    box.put(DONE)
    finished = Stream("finished", box, lambda: cancelled.append("finished"))
    del finished
    gc.collect()
    assert cancelled == ["unread", "closed"]


def test_drained_returns_once_the_engine_has_let_go() -> None:
    box = Mailbox()

    async def run() -> bool:
        waiting = asyncio.ensure_future(box.wait_drained())
        await asyncio.sleep(0)
        early = waiting.done()
        threading.Thread(target=box.mark_drained).start()
        await waiting
        await box.wait_drained()
        return early

    assert asyncio.run(run()) is False
