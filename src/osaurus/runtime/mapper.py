"""One choice's engine events to runtime events: one to one, with four promises added.

Tool arguments become canonical JSON; a stream always ends with an `Info`, made up as a failure
when the engine sent none; U+FFFE never leaves in model text, so that no output can pass for a
sentinel string; progress stops at the first output. Text is otherwise not looked at.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from osaurus.runtime.canonical import canonical_json
from osaurus.types.engine import EventStream
from osaurus.types.events import (
    Chunk,
    Event,
    Info,
    PrefillProgress,
    Reasoning,
    RuntimeEvent,
    ToolCall,
    ToolCallProgress,
    ToolInvocation,
)

logger = logging.getLogger(__name__)

_SENTINEL, _REPLACEMENT = "\ufffe", "\ufffd"

#: Characters a token stands for when an engine died without saying how many it made.
_CHARACTERS_PER_TOKEN = 4


class GenerationEventMapper:
    """Maps one `EventStream`. Iterate `events` once; closing it closes the stream.

    `info` is the stream's `Info` as soon as it is known. `forged_sentinels` counts the
    U+FFFE that were replaced.
    """

    def __init__(
        self, stream: EventStream, *, prompt_tokens: int, suppress_progress: bool = False
    ) -> None:
        self.info: Info | None = None
        self.forged_sentinels = 0
        self._stream = stream
        self._prompt_tokens = prompt_tokens
        self._drops_progress = suppress_progress
        self._estimated_tokens = 0
        self._ends_in_reasoning = False

    async def events(self) -> AsyncGenerator[RuntimeEvent]:
        """Yields until `Info`, which is last and always comes unless the iterator is closed."""
        try:
            async for event in self._stream:
                if isinstance(event, Info):
                    self.info = event
                    yield event
                    return
                mapped = self._map(event)
                if mapped is not None:
                    yield mapped
            self.info = self._made_up_info()
            yield self.info
        finally:
            self._stream.close()

    def _map(self, event: Event) -> RuntimeEvent | None:
        match event:
            case PrefillProgress():
                return None if self._drops_progress else event
            case Chunk(text, logprobs) | Reasoning(text, logprobs):
                if not text and not logprobs:
                    return None
                self._note_output(text, is_reasoning=isinstance(event, Reasoning))
                if _SENTINEL not in text:
                    return event
                return type(event)(self._guarded(text), logprobs)
            case ToolCallProgress(text):
                self._drops_progress = True
                return ToolCallProgress(self._guarded(text)) if text else None
            case ToolCall():
                self._drops_progress = True
                return self._invocation(event)
            case _:
                return None  # an event of a newer engine

    def _note_output(self, text: str, *, is_reasoning: bool) -> None:
        self._drops_progress = True
        self._ends_in_reasoning = is_reasoning
        if text:
            self._estimated_tokens += max(1, len(text) // _CHARACTERS_PER_TOKEN)

    def _guarded(self, text: str) -> str:
        forged = text.count(_SENTINEL)
        if not forged:
            return text
        if not self.forged_sentinels:
            logger.warning("model output held U+FFFE, which marks sentinels; it was replaced")
        self.forged_sentinels += forged
        return text.replace(_SENTINEL, _REPLACEMENT)

    def _invocation(self, call: ToolCall) -> ToolInvocation:
        name = self._guarded(call.name)
        try:
            arguments = canonical_json(call.arguments)
        except (TypeError, ValueError):
            logger.warning("the arguments of a call to %r have no JSON form", name)
            arguments = canonical_json({"_error": "argument_serialization_failed", "_tool": name})
        return ToolInvocation(
            name=name, arguments_json=self._guarded(arguments), call_id=call.call_id
        )

    def _made_up_info(self) -> Info:
        logger.error("an engine ended a stream without its final report")
        return Info(
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._estimated_tokens,
            unclosed_reasoning=self._ends_in_reasoning,
            stop_reason="cancelled",
            error="the engine ended the answer without a final report",
            error_code="engine_error",
        )
