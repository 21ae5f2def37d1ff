"""`POST /chat/completions`, plain and streamed: one request through `chat/` and back.

The handler decodes, opens the stream, and encodes; what the fields mean is in
`openai_request.py`, how the answer looks in `openai_chunks.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from osaurus.chat.completion import usage_of
from osaurus.chat.service import ChatEngine
from osaurus.errors import OsaurusError
from osaurus.server.apis.openai_chunks import ChunkWriter, whole_answer
from osaurus.server.apis.openai_request import to_chat_request
from osaurus.server.apis.openai_wire import ChatCompletionBody, ChatCompletionChunk, encode
from osaurus.server.body import read_json
from osaurus.server.errors import error_body
from osaurus.server.exchange import Exchange
from osaurus.server.limits import Admission
from osaurus.server.sse import DONE, EventStreamResponse, data_frame, run_while_connected
from osaurus.types.chat import ChatRequest
from osaurus.types.events import Info, PrefillProgress

#: Progress is reported at most this often, unless it moved a good deal.
_PROGRESS_INTERVAL_S = 0.1
_PROGRESS_STEP = 0.05


class OpenAIChat:
    def __init__(self, chat: ChatEngine, admission: Admission, *, ping_interval_s: float) -> None:
        self._chat = chat
        self._admission = admission
        self._ping_interval_s = ping_interval_s

    async def chat_completions(self, request: Request) -> Response | EventStreamResponse:
        exchange = Exchange.of(request)
        body = await read_json(request, ChatCompletionBody)
        chat_request = to_chat_request(body, exchange.request_id)
        exchange.facts["model"] = body.model[:200]
        if not _wants_stream(body, request):
            return await run_while_connected(request.receive, self._answer(chat_request, exchange))
        options = body.stream_options
        asked = request.headers.get("x-osaurus-progress") == "1"
        frames = self._frames(
            chat_request,
            exchange,
            include_usage=bool(options and options.include_usage),
            include_progress=bool(asked or (options and options.include_progress)),
        )
        return EventStreamResponse(
            frames, failure_frames=_failure_frames, ping_interval_s=self._ping_interval_s
        )

    async def _answer(self, chat_request: ChatRequest, exchange: Exchange) -> Response:
        with self._admission.slot():
            completion = await self._chat.complete(chat_request)
        exchange.note_answer(usage_of([choice.info for choice in completion.choices]))
        exchange.note_end([choice.info for choice in completion.choices])
        return Response(
            encode(whole_answer(completion, chat_request.model)), media_type="application/json"
        )

    async def _frames(
        self,
        chat_request: ChatRequest,
        exchange: Exchange,
        *,
        include_usage: bool,
        include_progress: bool,
    ) -> AsyncGenerator[bytes]:
        with self._admission.slot():
            async with await self._chat.open(chat_request) as stream:
                writer = ChunkWriter(
                    chat_request.model,
                    num_choices=stream.num_choices,
                    include_usage=include_usage,
                    prefix_hash=stream.prefix_hash,
                )
                throttle = _ProgressThrottle()
                infos: list[Info] = []
                is_open = False
                async for item in stream:
                    if isinstance(item.event, PrefillProgress):
                        if include_progress and not is_open and throttle.passes(item.event):
                            yield _frame(writer.progress(item.event))
                        continue
                    if not is_open:
                        # Not before the first output: what fails until then has a status.
                        is_open = True
                        for chunk in writer.opening():
                            yield _frame(chunk)
                    if isinstance(item.event, Info):
                        infos.append(item.event)
                    else:
                        exchange.note_output(item.event)
                    for chunk in writer.chunks(item):
                        yield _frame(chunk)
                for chunk in writer.closing():
                    yield _frame(chunk)
                exchange.note_answer(usage_of(infos))
                exchange.note_end(infos)
                yield DONE


class _ProgressThrottle:
    """Lets through the first and last report, each new stage, and those that come late or far
    enough apart."""

    def __init__(self) -> None:
        self._sent_at = 0.0
        self._sent_fraction = -1.0
        self._sent_stage = ""

    def passes(self, event: PrefillProgress) -> bool:
        now = time.monotonic()
        is_edge = event.completed == 0 or event.stage not in (self._sent_stage, "prefill")
        is_due = now - self._sent_at >= _PROGRESS_INTERVAL_S
        is_far = event.fraction - self._sent_fraction >= _PROGRESS_STEP
        if not (is_edge or is_due or is_far):
            return False
        self._sent_at, self._sent_fraction, self._sent_stage = now, event.fraction, event.stage
        return True


def _wants_stream(body: ChatCompletionBody, request: Request) -> bool:
    if body.stream is not None:
        return body.stream
    return "text/event-stream" in request.headers.get("accept", "")


def _frame(chunk: ChatCompletionChunk) -> bytes:
    return data_frame(encode(chunk))


def _failure_frames(error: OsaurusError) -> bytes:
    return data_frame(error_body(error, "openai")) + DONE
