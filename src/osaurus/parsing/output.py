"""One choice's token ids to events: detokenizer, output machine, stop strings, in that order.

Implements `types.engine.OutputPipeline` and runs on the engine's thread. Here alone it is
decided which event a token's logprob travels with, and what a stop string cuts off. Knows no
marker and no format: those are the machine's.

    token id -> Detokenizer -> OutputMachine -> content ----> StopMatcher -> Chunk
                                             -> reasoning ----------------> Reasoning
                                             -> open envelope ------------> ToolCallProgress
                                             -> complete envelope --------> ToolCall

End of stream: the detokenizer's rest goes through the machine, *then* `unclosed_reasoning` is
read, then machine and stop matcher are flushed. After a stop match nothing is sent, since
everything held came later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from osaurus.parsing.detokenize import Detokenizer, TokenBytes
from osaurus.parsing.pieces import CallFailure, OutputMachine, Piece, Rail
from osaurus.parsing.stop import StopMatcher
from osaurus.types.events import (
    Chunk,
    Event,
    Reasoning,
    TokenLogprob,
    ToolCallProgress,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Token:
    """A token not yet accounted for: the code points `start..end` that it has bytes in."""

    start: int
    end: int
    logprob: TokenLogprob | None


class OutputPipeline:
    """Turns one choice's sampled tokens into events; `machine` None means all is content.

    Logprobs: a token goes with the first event that shows a character it has a share in, so
    that joining the lists of all `Chunk` and `Reasoning` events gives every shown token
    once, in order, and the joined bytes of a `Chunk` stream are its text. Tokens that are
    wholly protocol, marker or part of a matched stop string are left out. A token without
    bytes goes with its neighbour.

    `reasoning_tokens` counts tokens that begin between a reasoning opener and the end of its
    closer, both included.
    """

    __slots__ = (
        "_content_received",
        "_content_shown",
        "_content_tokens",
        "_detokenizer",
        "_ends_in_content",
        "_machine",
        "_machine_failed",
        "_position",
        "_stop",
        "_token_bytes",
        "_tokens",
        "halted",
        "reasoning_tokens",
        "stop_string",
        "unclosed_reasoning",
    )

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        stop: Sequence[str] = (),
        machine: OutputMachine | None = None,
    ) -> None:
        self.halted = False
        self.stop_string: str | None = None
        self.unclosed_reasoning = False
        self.reasoning_tokens = 0
        self._token_bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._detokenizer = Detokenizer()
        self._machine = machine
        self._machine_failed = False
        self._stop = StopMatcher(stop)
        self._tokens: deque[_Token] = deque()
        self._position = 0
        #: Tokens whose text the stop matcher holds, with their first place in the content.
        self._content_tokens: deque[tuple[int, TokenLogprob]] = deque()
        self._content_received = 0
        self._content_shown = 0
        self._ends_in_content = True

    @property
    def tool_call_protocol_failure(self) -> bool:
        return self._machine_failed or (self._machine is not None and self._machine.has_failed)

    @property
    def call_failures(self) -> Sequence[CallFailure]:
        """What broke, for the status of this response."""
        return () if self._machine is None else self._machine.failures

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> list[Event]:
        """Events that this token makes certain. Nothing once `halted`."""
        if self.halted:
            return []
        detokenizer = self._detokenizer
        start = detokenizer.next_start
        text = detokenizer.push(self._token_bytes(token_id))
        if logprob is not None or self._machine is not None:
            self._tokens.append(_Token(start, detokenizer.last_end, logprob))
        if not text:
            return []
        return self._emit(self._separate(text))

    def finish(self) -> list[Event]:
        """The rest, at a natural end of any kind; nothing when a stop string matched."""
        if self.halted:
            return []
        tail = self._detokenizer.flush()
        events = self._emit(self._separate(tail)) if tail else []
        if self.halted:
            return events
        if self._machine is not None and not self._machine_failed:
            self.unclosed_reasoning = self._machine.in_reasoning
            events += self._emit(self._close())
            for failure in self._machine.failures:
                logger.info("malformed_tool_call_envelope: %s", failure)
        if self.halted:
            return _joined(events)
        self._show(events, self._stop.flush())
        trailing = self._trailing_logprobs()
        if trailing:
            events.append(Chunk("", trailing))
        return _joined(events)

    def _separate(self, text: str) -> list[Piece]:
        """Through the machine, if any. A fault in a parser costs the parsing, not the answer."""
        machine = self._machine
        if machine is None or self._machine_failed:
            return [Piece(Rail.CONTENT, text)]
        try:
            return machine.push(text)
        except Exception:  # noqa: BLE001 - any fault of a parser, logged by _give_up
            return self._give_up(machine)

    def _close(self) -> list[Piece]:
        machine = self._machine
        if machine is None or self._machine_failed:
            return []
        try:
            return machine.finish()
        except Exception:  # noqa: BLE001 - any fault of a parser, logged by _give_up
            return self._give_up(machine)

    def _give_up(self, machine: OutputMachine) -> list[Piece]:
        logger.exception("output parser failed; the rest of this response is passed on as text")
        self._machine_failed = True
        return machine.abandon()

    def _emit(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            thought = self._account(piece)
            if piece.rail is Rail.CONTENT:
                self._show(events, self._stop.push(piece.text))
                if self._stop.matched is not None:
                    self.halted = True
                    self.stop_string = self._stop.matched
                    break
            elif piece.rail is Rail.REASONING:
                events.append(Reasoning(piece.text, thought))
            elif piece.rail is Rail.PROTOCOL and piece.text:
                events.append(ToolCallProgress(piece.text))
            if piece.calls:
                # What the matcher holds came before the call, and clients drop text after one.
                self._show(events, self._stop.flush())
                events.extend(piece.calls)
        return _joined(events)

    def _account(self, piece: Piece) -> tuple[TokenLogprob, ...]:
        """Settle the tokens that begin in `piece` or before; return those of reasoning."""
        start = self._position
        end = self._position = start + len(piece.text)
        is_thinking = piece.rail in (Rail.REASONING, Rail.THINK_MARK)
        is_shown = piece.rail in (Rail.CONTENT, Rail.REASONING)
        thought: list[TokenLogprob] = []
        reaching_on: list[_Token] = []
        tokens = self._tokens
        while tokens and tokens[0].start < end:
            token = tokens.popleft()
            if is_thinking and token.start >= start:
                self.reasoning_tokens += 1
            if not is_shown:
                if token.end > end:
                    reaching_on.append(token)
            elif token.logprob is None:
                continue
            elif piece.rail is Rail.REASONING:
                thought.append(token.logprob)
            else:
                place = self._content_received + max(0, token.start - start)
                self._content_tokens.append((place, token.logprob))
        tokens.extendleft(reversed(reaching_on))
        if piece.rail is Rail.CONTENT:
            self._content_received += len(piece.text)
        self._ends_in_content = piece.rail is Rail.CONTENT
        return tuple(thought)

    def _show(self, events: list[Event], text: str) -> None:
        """Append visible text with the logprobs of the tokens that it is the first to show."""
        if not text:
            return
        self._content_shown += len(text)
        waiting = self._content_tokens
        shown: list[TokenLogprob] = []
        while waiting and waiting[0][0] < self._content_shown:
            shown.append(waiting.popleft()[1])
        events.append(Chunk(text, tuple(shown)))

    def _trailing_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of tokens without bytes after the last visible character."""
        if not self._ends_in_content:
            return ()
        return tuple(token.logprob for token in self._tokens if token.logprob is not None)


def _joined(events: list[Event]) -> list[Event]:
    """The same events with neighbouring text of one kind in one event."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Chunk) and isinstance(last, Chunk):
            joined[-1] = Chunk(last.text + event.text, last.logprobs + event.logprobs)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text, last.logprobs + event.logprobs)
        elif isinstance(event, ToolCallProgress) and isinstance(last, ToolCallProgress):
            joined[-1] = ToolCallProgress(last.text + event.text)
        else:
            joined.append(event)
    return joined
