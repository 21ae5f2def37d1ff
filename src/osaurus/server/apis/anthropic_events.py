"""An answer as Anthropic's stream events, and the whole message as their fold.

In: one choice's runtime events. Out: events in the one legal order,

    message_start  ping  (content_block_start  content_block_delta*  content_block_stop)*
    message_delta  message_stop

blocks counted from 0 and never nested. Pure: no sockets. A plain answer is made from the same
events, so that it cannot differ from the streamed one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from osaurus.chat.completion import finish_reason
from osaurus.server.apis.anthropic_signature import Signature
from osaurus.server.apis.anthropic_wire import (
    AnswerMessage,
    BlockDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    StopDelta,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from osaurus.types.events import Chunk, Info, Reasoning, RuntimeEvent, ToolInvocation

#: Input of a call comes in pieces of at most this many characters.
INPUT_PIECE = 512

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}

_Kind = Literal["text", "thinking"]


class MessageWriter:
    """The events of one answer. `opening` first, then `events` for each event, `Info` last.

    `begin_signature` starts a block's signature. Without `shows_thinking` a thinking block has
    its signature alone. Of what ended the answer only `stop_sequences` are the client's.
    """

    def __init__(
        self,
        model: str,
        *,
        begin_signature: Callable[[], Signature],
        shows_thinking: bool = True,
        stop_sequences: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._begin_signature = begin_signature
        self._shows_thinking = shows_thinking
        self._stop_sequences = frozenset(stop_sequences)
        self._notes = list(notes)
        self._num_blocks = 0
        self._num_calls = 0
        self._open: _Kind | None = None
        self._signature: Signature | None = None
        self._space: tuple[_Kind, str] | None = None

    def opening(self, prompt_tokens: int, cached_tokens: int) -> Iterator[StreamEvent]:
        yield MessageStart(
            message=AnswerMessage(
                id=f"msg_{secrets.token_hex(12)}",
                model=self._model,
                usage=_usage(prompt_tokens, cached_tokens, 0),
            )
        )
        yield Ping()

    def events(
        self, event: RuntimeEvent, remarks: Mapping[str, Any] | None = None
    ) -> Iterator[StreamEvent]:
        """What one event becomes; nothing for those that have no place on this wire."""
        match event:
            case Chunk(text):
                yield from self._piece("text", text)
            case Reasoning(text):
                yield from self._piece("thinking", text)
            case ToolInvocation():
                yield from self._call(event)
            case Info():
                yield from self._close()
                yield self._message_delta(event, remarks or {})
                yield MessageStop()
            case _:
                pass

    def _piece(self, kind: _Kind, text: str) -> Iterator[StreamEvent]:
        """White space alone opens no block: around a call it belongs to nothing."""
        if self._open != kind:
            if self._space is not None and self._space[0] == kind:
                text = self._space[1] + text
            self._space = (kind, text)
            if not text or text.isspace():
                return
            yield from self._begin(kind)
        self._space = None
        if not text:
            return
        if self._signature is not None:
            self._signature.add(text)
            if self._shows_thinking:
                yield self._delta(ThinkingDelta(thinking=text))
        else:
            yield self._delta(TextDelta(text=text))

    def _begin(self, kind: _Kind) -> Iterator[StreamEvent]:
        yield from self._close()
        self._open = kind
        is_thinking = kind == "thinking"
        self._signature = self._begin_signature() if is_thinking else None
        block = ThinkingBlock() if is_thinking else TextBlock()
        yield ContentBlockStart(index=self._num_blocks, content_block=block)

    def _close(self) -> Iterator[StreamEvent]:
        self._space = None
        if self._open is None:
            return
        if self._signature is not None:
            yield self._delta(SignatureDelta(signature=self._signature.text()))
        yield ContentBlockStop(index=self._num_blocks)
        self._num_blocks += 1
        self._open = self._signature = None

    def _call(self, call: ToolInvocation) -> Iterator[StreamEvent]:
        yield from self._close()
        self._num_calls += 1
        block = ToolUseBlock(id=_call_id(call), name=call.name)
        yield ContentBlockStart(index=self._num_blocks, content_block=block)
        text = call.arguments_json
        for start in range(0, len(text), INPUT_PIECE):
            yield self._delta(InputJsonDelta(partial_json=text[start : start + INPUT_PIECE]))
        yield ContentBlockStop(index=self._num_blocks)
        self._num_blocks += 1

    def _delta(self, delta: BlockDelta) -> ContentBlockDelta:
        return ContentBlockDelta(index=self._num_blocks, delta=delta)

    def _message_delta(self, info: Info, remarks: Mapping[str, Any]) -> MessageDelta:
        reason = finish_reason(info, has_calls=self._num_calls > 0)
        stop_reason, stop_sequence = _STOP_REASONS.get(reason, "end_turn"), None
        if reason == "stop" and info.stop_string in self._stop_sequences:
            stop_reason, stop_sequence = "stop_sequence", info.stop_string
        usage = _usage(info.prompt_tokens, info.cached_prompt_tokens, info.generated_tokens)
        usage.output_tokens_details = OutputTokensDetails(thinking_tokens=info.reasoning_tokens)
        return MessageDelta(
            delta=StopDelta(stop_reason=stop_reason, stop_sequence=stop_sequence),
            usage=usage,
            osaurus=self._remarks(remarks),
        )

    def _remarks(self, remarks: Mapping[str, Any]) -> Mapping[str, Any] | UnsetType:
        if not self._notes:
            return remarks or UNSET
        return {**remarks, "notes": [*self._notes, *remarks.get("notes", ())]}


def whole_message(events: Iterable[StreamEvent]) -> AnswerMessage:
    """The message that a client would put together from `events`."""
    message: AnswerMessage | None = None
    text: list[str] = []
    for event in events:
        match event:
            case MessageStart():
                message = msgspec.structs.replace(event.message, content=[])
            case ContentBlockStart():
                assert message is not None
                message.content.append(event.content_block)
                text.clear()
            case ContentBlockDelta():
                assert message is not None
                _extend(message, event.delta, text)
            case ContentBlockStop():
                assert message is not None
                _finish(message, "".join(text))
            case MessageDelta():
                assert message is not None
                message.stop_reason = event.delta.stop_reason
                message.stop_sequence = event.delta.stop_sequence
                message.usage, message.osaurus = event.usage, event.osaurus
            case Ping() | MessageStop():
                pass
    assert message is not None
    return message


def _extend(message: AnswerMessage, delta: BlockDelta, text: list[str]) -> None:
    match delta:
        case TextDelta():
            text.append(delta.text)
        case ThinkingDelta():
            text.append(delta.thinking)
        case InputJsonDelta():
            text.append(delta.partial_json)
        case SignatureDelta():
            block = message.content[-1]
            assert isinstance(block, ThinkingBlock)
            block.signature = delta.signature


def _finish(message: AnswerMessage, text: str) -> None:
    match message.content[-1]:
        case TextBlock() as block:
            block.text = text
        case ThinkingBlock() as block:
            block.thinking = text
        case ToolUseBlock() as block:
            block.input = msgspec.Raw(text.encode())


def _call_id(call: ToolInvocation) -> str:
    """The model's own id where it writes one, since its template wants it back; one that was
    made here has this protocol's prefix."""
    if call.call_id is None:
        return f"toolu_{secrets.token_hex(12)}"
    made = call.call_id.removeprefix("call_")
    return call.call_id if made == call.call_id else f"toolu_{made}"


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> MessageUsage:
    return MessageUsage(
        input_tokens=prompt_tokens - cached_tokens,
        cache_read_input_tokens=cached_tokens,
        output_tokens=output_tokens,
    )
