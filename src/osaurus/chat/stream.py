"""The events of one request's choices, merged in the order in which they came.

Producers (one task a choice) and the consumer meet in one bounded queue: a consumer that stops
reading stops the producers, whose engine mailboxes then join text instead of growing. Closing
the stream cancels the request at once. The lease goes back when the engine has let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from osaurus.chat.coalesce import Coalescer
from osaurus.chat.observer import AnswerObserver
from osaurus.chat.rules import ChoiceRules
from osaurus.errors import (
    EngineShutdown,
    InsufficientResources,
    OsaurusError,
    RequestFailed,
    RequestTimedOut,
    ServerOverloaded,
)
from osaurus.runtime.mapper import GenerationEventMapper
from osaurus.runtime.pool import HeldModel
from osaurus.types.engine import EventStream
from osaurus.types.events import Info, RuntimeEvent
from osaurus.types.sampling import SamplingParams

#: Items between producers and consumer.
MAX_QUEUED_EVENTS = 256


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """`index` is the choice's number, from 0. `remarks` come with its `Info`."""

    index: int
    event: RuntimeEvent
    remarks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deadline:
    """When an answer must be whole: `at` on the loop's clock, `limit_s` after its request."""

    at: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception


class ChatStream:
    """Iterate it once, inside `async with`. Every choice ends with its `Info`.

    Raises the failure of any choice as an `OsaurusError`, `RequestTimedOut` past the deadline;
    what was yielded before stands.
    """

    def __init__(
        self,
        *,
        held: HeldModel,
        streams: Sequence[EventStream],
        rules: Sequence[ChoiceRules],
        params: SamplingParams,
        prompt_tokens: int,
        suppress_progress: bool = False,
        interval: int = 1,
        deadline: Deadline | None = None,
        observers: Sequence[AnswerObserver] = (),
        prefix_hash: str = "",
    ) -> None:
        """`interval` pieces of text are passed on as one."""
        self._interval = interval
        self._deadline = deadline
        self._observers = observers
        self.model_id = held.model.model_id
        self.params = params  #: those that run
        self.prompt_tokens = prompt_tokens
        self.prefix_hash = prefix_hash  #: of its system text and tools
        self.num_choices = len(streams)
        self._held = held
        self._streams = streams
        self._queue: asyncio.Queue[ChoiceEvent | _Failure] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._num_ended = 0
        self._closing: asyncio.Task[None] | None = None
        self._letting_go = asyncio.create_task(self._let_go())
        self._producers = [
            asyncio.create_task(
                self._produce(
                    index,
                    GenerationEventMapper(
                        stream, prompt_tokens=prompt_tokens, suppress_progress=suppress_progress
                    ),
                    rules[index],
                )
            )
            for index, stream in enumerate(streams)
        ]

    async def __aenter__(self) -> ChatStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> ChoiceEvent:
        if self._num_ended == self.num_choices:
            raise StopAsyncIteration
        item = await self._next()
        if isinstance(item, _Failure):
            raise item.error
        if isinstance(item.event, Info):
            self._num_ended += 1
            failure = failure_of(item.event)
            if failure is not None:
                raise failure
        return item

    async def _next(self) -> ChoiceEvent | _Failure:
        if self._deadline is None:
            return await self._queue.get()
        try:
            async with asyncio.timeout_at(self._deadline.at):
                return await self._queue.get()
        except TimeoutError:
            raise RequestTimedOut(self._deadline.limit_s) from None

    def cancel(self) -> None:
        """End the answer from outside its consumer, who finds an error where it would go on."""
        for stream in self._streams:
            stream.close()

    async def aclose(self) -> None:
        """Cancel what still runs, wait for the engine to let go, release the lease.

        A caller that is cancelled while waiting leaves this to finish by itself. Idempotent.
        """
        if self._closing is None:
            # First, or one that wakes up now would take a closed stream for a broken one.
            for producer in self._producers:
                producer.cancel()
            self.cancel()
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _produce(self, index: int, mapper: GenerationEventMapper, rules: ChoiceRules) -> None:
        pieces = Coalescer(self._interval)
        try:
            async with aclosing(mapper.events()) as events:
                async for event in events:
                    for observer in self._observers:
                        observer.event(index, event)
                    for kept in (one for taken in rules.take(event) for one in pieces.take(taken)):
                        remarks = rules.remarks(kept) if isinstance(kept, Info) else {}
                        await self._queue.put(ChoiceEvent(index, kept, remarks))
        except Exception as error:  # noqa: BLE001 - raised again where the stream is read
            await self._queue.put(_Failure(error))

    async def _close(self) -> None:
        try:
            await asyncio.gather(*self._producers, return_exceptions=True)
            for observer in self._observers:
                observer.closed()
        finally:
            await self._letting_go

    async def _let_go(self) -> None:
        """The lease lasts until the engine has let go of every choice, not until the consumer
        has read it all: one that stops reading keeps no model from being unloaded."""
        try:
            for stream in self._streams:
                await stream.drained()
        finally:
            self._held.release()


#: What an engine's `error_code` means above it. Any other is a failure of the request alone.
_FAILURES: dict[str, type[OsaurusError]] = {
    error.code: error for error in (InsufficientResources, EngineShutdown, ServerOverloaded)
}


def failure_of(info: Info) -> OsaurusError | None:
    """The error a consumer must see, or None when the choice ended as it should.

    A choice that was cancelled without its consumer's doing was so by a shutdown.
    """
    if info.error is not None:
        return _FAILURES.get(info.error_code or "", RequestFailed)(info.error)
    if info.stop_reason == "cancelled":
        return EngineShutdown("the model was unloaded or the server stopped before the answer")
    return None
