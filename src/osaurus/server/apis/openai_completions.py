"""`POST /completions`: raw text and token ids, through the same engine path as chats.

Each prompt is a request of its own to `chat/`; their choices are numbered on, prompt by prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing

from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.completion import usage_of
from osaurus.chat.service import ChatEngine
from osaurus.chat.stream import ChatStream, ChoiceEvent
from osaurus.errors import ContextLengthExceeded, OsaurusError
from osaurus.server.apis.openai_completions_request import to_raw_requests, wanted_logprobs
from osaurus.server.apis.openai_completions_wire import (
    ChoiceText,
    CompletionBody,
    CompletionChoice,
    CompletionWriter,
)
from osaurus.server.apis.openai_wire import encode
from osaurus.server.body import read_json
from osaurus.server.errors import error_body
from osaurus.server.exchange import Exchange
from osaurus.server.limits import Admission
from osaurus.server.sse import DONE, EventStreamResponse, data_frame, run_while_connected
from osaurus.types.chat import ChatRequest, RawPrompt, Usage
from osaurus.types.events import Chunk, Info

#: Events between the streams of several prompts and the one that is sent.
_MAX_QUEUED = 64


class OpenAICompletions:
    def __init__(self, chat: ChatEngine, admission: Admission, *, ping_interval_s: float) -> None:
        self._chat = chat
        self._admission = admission
        self._ping_interval_s = ping_interval_s

    async def completions(self, request: Request) -> Response | EventStreamResponse:
        exchange = Exchange.of(request)
        body = await read_json(request, CompletionBody)
        exchange.facts["model"] = body.model[:200]
        requests = to_raw_requests(body, exchange.request_id)
        accepts = request.headers.get("accept", "")
        if body.stream or (body.stream is None and "text/event-stream" in accepts):
            return EventStreamResponse(
                self._frames(body, requests, exchange),
                failure_frames=_failure_frames,
                ping_interval_s=self._ping_interval_s,
            )
        return await run_while_connected(request.receive, self._answer(body, requests, exchange))

    async def _answer(
        self, body: CompletionBody, requests: Sequence[ChatRequest], exchange: Exchange
    ) -> Response:
        answer = _Answer(body, requests, await self._echoes(body, requests))
        pieces: dict[int, list[CompletionChoice]] = {}
        async with aclosing(self._events(requests)) as events:
            async for number, item in events:
                for piece in answer.pieces(number, item):
                    pieces.setdefault(piece.index, []).append(piece)
        answer.note(exchange)
        choices = [_joined(pieces[index]) for index in sorted(pieces)]
        whole = CompletionWriter(body.model).whole(choices, answer.prompts())
        return Response(encode(whole), media_type="application/json")

    async def _frames(
        self, body: CompletionBody, requests: Sequence[ChatRequest], exchange: Exchange
    ) -> AsyncGenerator[bytes]:
        includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        writer = CompletionWriter(body.model, includes_usage=includes_usage)
        answer = _Answer(body, requests, await self._echoes(body, requests))
        async with aclosing(self._events(requests)) as events:
            async for number, item in events:
                exchange.note_output(item.event)
                for piece in answer.pieces(number, item):
                    yield data_frame(encode(writer.chunk(piece)))
        answer.note(exchange)
        if includes_usage:
            yield data_frame(encode(writer.last(answer.prompts())))
        yield DONE

    async def _events(
        self, requests: Sequence[ChatRequest]
    ) -> AsyncGenerator[tuple[int, ChoiceEvent]]:
        """What all prompts' choices say, each with its prompt's number. Counts as one request
        for admission: the engine's own queue holds the prompts that wait."""
        with self._admission.slot():
            async with AsyncExitStack() as stack:
                streams = [await stack.enter_async_context(await self._open(r)) for r in requests]
                async with aclosing(_merged(streams)) as events:
                    async for number, item in events:
                        yield number, item

    async def _open(self, request: ChatRequest) -> ChatStream:
        try:
            return await self._chat.open(request, suppress_progress=True)
        except ContextLengthExceeded as error:
            error.field = "prompt"
            raise

    async def _echoes(self, body: CompletionBody, requests: Sequence[ChatRequest]) -> list[str]:
        """Each prompt's text, where the answer shall begin with it."""
        if not body.echo:
            return [""] * len(requests)
        prompts = [request.prompt for request in requests]
        if all(prompt is not None and isinstance(prompt.content, str) for prompt in prompts):
            return [str(prompt.content) for prompt in prompts if prompt is not None]
        model = await self._chat.runtime.read(body.model)
        return [_text_of(prompt, model.tokenizer.token_bytes) for prompt in prompts]


class _Answer:
    """Events of all prompts to pieces of numbered choices, and what was counted."""

    def __init__(
        self, body: CompletionBody, requests: Sequence[ChatRequest], echoes: Sequence[str]
    ) -> None:
        self._n = requests[0].n
        num_top = wanted_logprobs(body) or 0
        self._texts = [
            ChoiceText(i, echo=echoes[i // self._n], num_top=num_top)
            for i in range(len(requests) * self._n)
        ]
        self._infos: dict[int, Info] = {}

    def pieces(self, number: int, item: ChoiceEvent) -> list[CompletionChoice]:
        text = self._texts[number * self._n + item.index]
        match item.event:
            case Chunk(shown, logprobs):
                return [text.piece(shown, logprobs)]
            case Info() as info:
                self._infos[text.index] = info
                return [text.end(info, item.remarks)]
            case _:
                return []

    def prompts(self) -> list[list[Info]]:
        infos = [info for _, info in sorted(self._infos.items())]
        return [infos[i : i + self._n] for i in range(0, len(infos), self._n)]

    def note(self, exchange: Exchange) -> None:
        usages = [usage_of(infos) for infos in self.prompts()]
        exchange.note_answer(
            Usage(
                prompt_tokens=sum(usage.prompt_tokens for usage in usages),
                completion_tokens=sum(usage.completion_tokens for usage in usages),
                cached_tokens=sum(usage.cached_tokens for usage in usages),
            )
        )
        exchange.note_end(list(self._infos.values()))


async def _merged(streams: Sequence[ChatStream]) -> AsyncGenerator[tuple[int, ChoiceEvent]]:
    """Events of several streams as they come. Raises what the first of them to fail raised."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    queue: asyncio.Queue[tuple[int, ChoiceEvent | OsaurusError | None]] = asyncio.Queue(_MAX_QUEUED)

    async def read(number: int, stream: AsyncIterator[ChoiceEvent]) -> None:
        try:
            async for item in stream:
                await queue.put((number, item))
        except OsaurusError as error:
            await queue.put((number, error))
        else:
            await queue.put((number, None))

    readers = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    left = len(readers)
    try:
        while left:
            number, item = await queue.get()
            if isinstance(item, OsaurusError):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _joined(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """A choice's pieces, the last of which says how it ended, as one."""
    *shown, whole = pieces
    whole.text = "".join(piece.text for piece in pieces)
    for piece in shown:
        if piece.logprobs is None:
            continue
        if whole.logprobs is None:
            whole.logprobs = piece.logprobs
            continue
        whole.logprobs.tokens += piece.logprobs.tokens
        whole.logprobs.token_logprobs += piece.logprobs.token_logprobs
        whole.logprobs.text_offset += piece.logprobs.text_offset
        if whole.logprobs.top_logprobs is not None:
            whole.logprobs.top_logprobs += piece.logprobs.top_logprobs or []
    return whole


def _failure_frames(error: OsaurusError) -> bytes:
    return data_frame(error_body(error, "openai")) + DONE


def _text_of(prompt: RawPrompt | None, token_bytes: Callable[[int], bytes]) -> str:
    if prompt is None or isinstance(prompt.content, str):
        return "" if prompt is None else str(prompt.content)
    return b"".join(map(token_bytes, prompt.content)).decode(errors="replace")
