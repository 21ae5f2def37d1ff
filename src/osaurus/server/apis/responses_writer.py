"""An answer as items, and the events that tell of them: one state machine for every form.

In: `chat/`'s runtime events of one choice. Out: stream events in a legal order, and at any time
the response object. A plain answer is what the same events add up to.

    created, in_progress -> items, one after another -> completed | incomplete | failed

An item opens with its first text and closes before the next one opens, or before the end; a call
comes whole. `output_index` is the item's place in the final object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from osaurus.chat.completion import usage_of
from osaurus.errors import ContextLengthExceeded, OsaurusError, ServerOverloaded, UserError
from osaurus.server.apis.responses_wire import (
    IncompleteDetails,
    InputTokensDetails,
    Item,
    OutputTokensDetails,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
    StreamEvent,
    new_id,
)
from osaurus.server.errors import param_of
from osaurus.types.events import Chunk, Info, Reasoning, RuntimeEvent, TokenLogprob, ToolInvocation
from osaurus.types.sampling import SamplingParams

#: Arguments of a call come in pieces of at most this many characters.
_ARGUMENT_PIECE = 512

#: What OpenAI sends for a probability of zero: JSON has no infinity.
_LOWEST_LOGPROB = -9999.0

_Kind = Literal["message", "reasoning"]


@dataclass(slots=True)
class _OpenItem:
    kind: _Kind
    item_id: str
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "summary_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def item(self, status: str, parts: Sequence[dict[str, Any]]) -> Item:
        if self.kind == "reasoning":
            shape: Item = {"type": "reasoning", "summary": list(parts)}
        else:
            shape = {"type": "message", "role": "assistant", "content": list(parts)}
        return {**shape, "id": self.item_id, "status": status}


class ResponseWriter:
    """`response` is its newest state; every change makes a new one."""

    def __init__(self, response: ResponseObject, notes: Sequence[str] = ()) -> None:
        self.response = response
        self._notes = list(notes)
        self._output: list[Item] = []
        self._open: _OpenItem | None = None
        self._waiting_logprobs: list[dict[str, Any]] = []
        self._next_number = 0
        self._has_begun = False
        self.has_ended = False

    def use_sampling(self, params: SamplingParams) -> None:
        """What runs, where the request left it to the model."""
        self._set(
            temperature=params.temperature,
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )

    def opening(self) -> list[StreamEvent]:
        self._has_begun = True
        self._set(status="in_progress")
        return [
            self._event("response.created", response=self.response),
            self._event("response.in_progress", response=self.response),
        ]

    def take(self, event: RuntimeEvent) -> list[StreamEvent]:
        """What one event becomes; nothing for those that have no place on this wire, and
        nothing behind the end."""
        if self.has_ended:
            return []
        match event:
            case Chunk(text, logprobs):
                return self._said("message", text, logprobs)
            case Reasoning(text):
                return self._said("reasoning", text, ())
            case ToolInvocation():
                return self._called(event)
            case _:
                return []

    def finish(self, info: Info, remarks: Mapping[str, Any]) -> list[StreamEvent]:
        """The end that the engine gave it."""
        if self.has_ended:
            return []
        is_cut = info.stop_reason == "length"
        self._remark(remarks)
        self._set(usage=wire_usage(info))
        return self._end(
            "response.incomplete" if is_cut else "response.completed",
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
        )

    def fail(self, error: OsaurusError) -> list[StreamEvent]:
        """An end by an error; what was said before stands."""
        self._remark({})
        return self._end("response.failed", status="failed", error=_fault(error))

    def cancel(self) -> list[StreamEvent]:
        """An end by whoever asked for the answer. The protocol has no event of that name."""
        self._remark({})
        return self._end("response.incomplete", status="cancelled")

    def _end(self, kind: str, **changes: Any) -> list[StreamEvent]:
        if self.has_ended:
            return []
        events = [] if self._has_begun else self.opening()
        is_whole = kind == "response.completed"
        events += self._close("completed" if is_whole else "incomplete")
        self.has_ended = True
        self._set(**changes)
        return [*events, self._event(kind, response=self.response)]

    def _said(self, kind: _Kind, text: str, logprobs: Sequence[TokenLogprob]) -> list[StreamEvent]:
        if kind == "message":
            self._waiting_logprobs += map(_logprob, logprobs)
        if not text:
            return []  # it only carries logprobs, of text that is yet to come
        events: list[StreamEvent] = []
        if self._open is None or self._open.kind != kind:
            events = [*self._close("completed"), *self._begin(kind)]
        item = self._open
        assert item is not None
        item.text.append(text)
        if kind == "reasoning":
            delta = self._in_part("response.reasoning_summary_text.delta", item, delta=text)
        else:
            shown, self._waiting_logprobs = self._waiting_logprobs, []
            item.logprobs += shown
            delta = self._in_part("response.output_text.delta", item, delta=text, logprobs=shown)
        return [*events, delta]

    def _begin(self, kind: _Kind) -> list[StreamEvent]:
        item = self._open = _OpenItem(kind, new_id("rs" if kind == "reasoning" else "msg"))
        added = self._of_item("response.output_item.added", item.item("in_progress", []))
        if kind == "reasoning":
            return [
                added,
                self._in_part("response.reasoning_summary_part.added", item, part=item.part("")),
            ]
        return [added, self._in_part("response.content_part.added", item, part=item.part(""))]

    def _close(self, status: str) -> list[StreamEvent]:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        text = "".join(item.text)
        part = item.part(text)
        if item.kind == "reasoning":
            events = [
                self._in_part("response.reasoning_summary_text.done", item, text=text),
                self._in_part("response.reasoning_summary_part.done", item, part=part),
            ]
        else:
            events = [
                self._in_part("response.output_text.done", item, text=text, logprobs=item.logprobs),
                self._in_part("response.content_part.done", item, part=part),
            ]
        return [*events, self._done(item.item(status, [part]))]

    def _called(self, call: ToolInvocation) -> list[StreamEvent]:
        events = self._close("completed")
        item_id, arguments = new_id("fc"), call.arguments_json
        begun: Item = {
            "type": "function_call",
            "id": item_id,
            "call_id": call.call_id or new_id("call"),
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        place = {"item_id": item_id, "output_index": len(self._output)}
        events.append(self._of_item("response.output_item.added", begun))
        for start in range(0, len(arguments), _ARGUMENT_PIECE):
            piece = arguments[start : start + _ARGUMENT_PIECE]
            kind = "response.function_call_arguments.delta"
            events.append(self._event(kind, **place, delta=piece))
        kind = "response.function_call_arguments.done"
        events.append(self._event(kind, **place, name=call.name, arguments=arguments))
        return [*events, self._done({**begun, "arguments": arguments, "status": "completed"})]

    def _done(self, item: Item) -> StreamEvent:
        event = self._of_item("response.output_item.done", item)
        self._output.append(item)
        self._set(output=list(self._output))
        return event

    def _of_item(self, kind: str, item: Item) -> StreamEvent:
        return self._event(kind, output_index=len(self._output), item=item)

    def _in_part(self, kind: str, item: _OpenItem, **fields: Any) -> StreamEvent:
        index = "summary_index" if item.kind == "reasoning" else "content_index"
        place = {"item_id": item.item_id, "output_index": len(self._output), index: 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        number = self._next_number
        self._next_number += 1
        return StreamEvent(type=kind, sequence_number=number, **fields)

    def _remark(self, remarks: Mapping[str, Any]) -> None:
        if self._notes or remarks:
            notes = [*self._notes, *remarks.get("notes", ())]
            self._set(osaurus={**remarks, **({"notes": notes} if notes else {})} or UNSET)

    def _set(self, **changes: Any) -> None:
        self.response = msgspec.structs.replace(self.response, **changes)


def wire_usage(info: Info) -> ResponseUsage:
    usage = usage_of([info])
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def _fault(error: OsaurusError) -> ResponseFault:
    """Clients know few codes and act on them: they wait as long as an overloaded server says,
    and shorten what was too long."""
    message, code = error.message, "server_error"
    if isinstance(error, ContextLengthExceeded):
        code = error.code
    elif isinstance(error, ServerOverloaded):
        code, message = "rate_limit_exceeded", f"{message} (try again in {error.retry_after_s}s)"
    elif isinstance(error, UserError):
        code = "invalid_prompt"
    return ResponseFault(
        code=code, message=message, type=error.code, param=param_of(error, "responses")
    )


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {**_entry(token), "top_logprobs": [_entry(other) for other in token.top]}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    is_finite = math.isfinite(token.logprob)
    return {
        "token": token.text,
        "logprob": token.logprob if is_finite else _LOWEST_LOGPROB,
        "bytes": list(token.data),
    }
