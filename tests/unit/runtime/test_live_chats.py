"""Background work waits for live chats to end, no longer than it is told to."""

from __future__ import annotations

import asyncio

from osaurus.runtime.live_chats import LiveChats
from unit.runtime.virtual import VirtualLoop


def test_waiting_ends_with_the_last_chat_or_the_time() -> None:
    loop = VirtualLoop()
    chats = LiveChats()
    chats.begin()
    chats.begin()
    patient = loop.create_task(chats.wait_idle())
    hurried = loop.create_task(chats.wait_idle(10))
    leaver = loop.create_task(chats.wait_idle())
    loop.settle()
    leaver.cancel()
    chats.end()
    loop.advance(10)
    assert hurried.result() is False
    assert leaver.cancelled()
    assert not patient.done()
    chats.end()
    chats.end()
    assert chats.count == 0
    loop.settle()
    assert patient.result() is True
    assert not asyncio.all_tasks(loop)
    loop.close()


def test_a_chat_that_begins_as_another_ends_goes_on_being_waited_for() -> None:
    loop = VirtualLoop()
    chats = LiveChats()
    chats.begin()
    waiter = loop.create_task(chats.wait_idle())
    loop.settle()
    chats.end()
    chats.begin()
    loop.settle()
    assert not waiter.done()
    chats.end()
    loop.settle()
    assert waiter.result() is True
    loop.close()
