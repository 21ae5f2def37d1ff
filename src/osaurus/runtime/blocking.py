"""Blocking calls made from the event loop, each on a thread that may be left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

_T = TypeVar("_T")


async def on_thread(function: Callable[[], _T]) -> _T:
    """Run `function` on a daemon thread of its own and return or raise what it does.

    Not the loop's executor: its threads are joined at exit, and a model load that takes a
    minute must not keep Ctrl-C waiting. A caller that is cancelled leaves the thread to
    finish; its outcome is dropped. When the outcome is there the thread, which may still be
    ending, holds neither `function` nor what it returned.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(outcome: list[Callable[[], None]]) -> None:
        deliver = outcome.pop()
        if not future.done():
            deliver()

    job = [function]
    del function

    def run() -> None:
        outcome = [_outcome(job.pop(), future)]
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:
            return  # the loop has closed: the caller it was for is gone with it

    threading.Thread(target=run, name="osaurus-blocking", daemon=True).start()
    return await future


def _outcome(function: Callable[[], _T], future: asyncio.Future[_T]) -> Callable[[], None]:
    try:
        return partial(future.set_result, function())
    except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
        return partial(future.set_exception, error)
