"""Harmony (gpt-oss): a response is a run of messages, each with a header that names its rail.

    <|channel|>CHANNEL[ to=RECIPIENT][ <|constrain|>json]<|message|>BODY<|end|>
    <|start|>assistant<|channel|>...

    analysis               reasoning          a function recipient    a call, body JSON
    final, commentary      content            any other recipient     reasoning (a built-in tool)

The prompt ends with `<|start|>assistant`, so a response begins inside a header. Headers and
control tokens never reach a rail, cut ones neither. An `OutputMachine` of its own, since its
messages are no envelopes in a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import ClassVar, Self

import regex

from osaurus.parsing.arguments import Toolset
from osaurus.parsing.calls import Calls, object_arguments
from osaurus.parsing.markers import MIN_HALF_MARKER, MarkerSet
from osaurus.parsing.pieces import CallFailure, Piece, Rail
from osaurus.parsing.rails import Rails
from osaurus.parsing.reasoning import Start
from osaurus.parsing.source import Cut, Malformed, Reader, Source
from osaurus.parsing.values import JSON, read_value
from osaurus.types.chat import Tool

_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADS = ("<|start|>", "<|channel|>")
_CALL_ENDS = (*_ENDS, *_HEADS)
_CALL_STOPS = MarkerSet(_CALL_ENDS)
#: In a header `<|message|>` begins the body; in a body the others begin the next message.
_HEADER_STOPS = MarkerSet(["<|message|>", *_ENDS])
_BODY_STOPS = MarkerSet([*_ENDS, *_HEADS, "<|message|>", "<|constrain|>"])
#: Longer headers are no longer held to be read; they are dropped up to the body all the same.
_MAX_HEADER = 1024
#: What a header begins with; anything else is text without one.
_HEADER_START = regex.compile(r"[ \t\r\n]{0,64}(?:<\|(?:start|channel|constrain|message)\|>|to=)")
_CHANNEL = regex.compile(r"<\|channel\|>\s*([A-Za-z_]+)")
_RECIPIENT = regex.compile(r"\bto=([^\s<]+)")
_FUNCTION_PREFIX = "functions."


class _State(Enum):
    BETWEEN = "between"  #: a header or, with nothing that begins one, bare text
    HEADER = "header"
    TEXT = "text"  #: a body on the current rail
    CALL = "call"
    SKIPPING = "skipping"  #: the rest of a broken call


class HarmonyMachine:
    """Separates harmony's messages. One instance a choice; see `pieces.OutputMachine`."""

    def __init__(self, *, tools: Sequence[Tool] = (), start: Start = Start.CONTENT) -> None:
        self._tools = Toolset(tools)
        self._source = Source()
        self._rails = Rails()
        self.failures: list[CallFailure] = []
        self._calls = Calls(self._tools)
        self._reader: Reader[None] | None = None
        self._call_length = 0
        is_open = start is not Start.CONTENT
        self._is_thinking = is_open
        self._state = _State.TEXT if is_open else _State.BETWEEN

    @property
    def in_reasoning(self) -> bool:
        return self._state is _State.TEXT and self._is_thinking

    @property
    def has_failed(self) -> bool:
        return bool(self.failures)

    def push(self, text: str) -> list[Piece]:
        self._source.feed(text)
        self._run()
        return self._rails.take()

    def finish(self) -> list[Piece]:
        self._source.ended = True
        self._run()
        self._rails.end_thought()
        return self._rails.take()

    def abandon(self) -> list[Piece]:
        source = self._source
        self._rails.end_thought(keep=True)
        self._rails.put(Rail.CONTENT, source.close() + source.text[source.pos :])
        return self._rails.take()

    def _run(self) -> None:
        while self._STEPS[self._state](self):
            pass

    # -- steps: each returns False when it needs more text

    def _step_between(self) -> bool:
        source = self._source
        found = _HEADER_START.match(source.text, source.pos, source.end, partial=True)
        if found is not None and found.partial:
            if not source.ended:
                return False
            found = None
        if found is None:
            self._is_thinking, self._state = False, _State.TEXT
        else:
            self._state = _State.HEADER
        return True

    def _step_header(self) -> bool:
        source = self._source
        hit = _HEADER_STOPS.find(source.text, source.pos, source.end)
        if hit is None:
            # Held while it may yet be read; a header that is cut or has no end is dropped.
            if source.ended or source.end - source.pos > _MAX_HEADER:
                self._piece(Rail.NOISE, _HEADER_STOPS.partial(source.text, source.pos, source.end))
            if source.ended:
                self._piece(Rail.NOISE, source.end)
            return False
        if hit.marker == "<|message|>":
            self._begin_body(source.text[source.pos : hit.start], hit.end)
        else:
            self._piece(Rail.NOISE, hit.end)
            self._state = _State.BETWEEN
        return True

    def _begin_body(self, header: str, stop: int) -> None:
        """Decide the rail of the message whose header is read."""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        target = recipient.group(1) if recipient else ""
        if target.startswith(_FUNCTION_PREFIX):
            self._source.begin()
            self._source.pos = stop
            self._call_length = 0
            self._calls = Calls(self._tools)
            self._reader = self._read_call(target.removeprefix(_FUNCTION_PREFIX))
            self._state = _State.CALL
            return
        # Built-in tools (`python`, `browser.*`) are not the client's: they are part of thinking.
        self._is_thinking = bool(target) or (channel is not None and channel.group(1) == "analysis")
        self._piece(Rail.THINK_MARK if self._is_thinking else Rail.NOISE, stop)
        self._state = _State.TEXT

    def _step_text(self) -> bool:
        source = self._source
        hit = _BODY_STOPS.find(source.text, source.pos, source.end)
        hold = _BODY_STOPS.partial(source.text, source.pos, source.end)
        mark = Rail.THINK_MARK if self._is_thinking else Rail.NOISE
        if hit is None:
            if source.ended and source.end - hold < MIN_HALF_MARKER:
                hold = source.end
            self._say(hold)
            if source.ended:
                # Held blanks come before the half marker that is dropped.
                self._rails.end_thought()
                self._piece(Rail.NOISE, source.end)
            return False
        self._say(hit.start)
        if hit.marker in _HEADS:
            self._rails.end_thought()
            self._state = _State.HEADER
            return True
        if hit.marker in _ENDS:
            self._rails.end_thought()
            self._state = _State.BETWEEN
        else:
            self._rails.settle_thought()
        self._piece(mark, hit.end)
        return True

    def _step_call(self) -> bool:
        source, reader = self._source, self._reader
        if reader is None:
            raise AssertionError("no reader in state CALL")
        try:
            next(reader)
        except StopIteration:
            self._protocol(source.close())
            self._state = _State.BETWEEN
        except Malformed as error:
            self._fail(str(error))
        except Cut:
            source.pos = source.end
            self._fail("the stream ended inside a call")
        else:
            self._protocol(source.release())
            return False
        return True

    def _read_call(self, raw: str) -> Reader[None]:
        """A call's body up to and with the message's end, which the end of the stream may be."""
        source, calls = self._source, self._calls
        name = calls.name(raw)
        yield from source.blanks()
        # An empty body counts only when its end is there: a cut one looks the same.
        is_empty = yield from source.at(*_CALL_ENDS)
        arguments = None if is_empty else (yield from read_value(source, JSON))
        yield from source.blanks()
        if (yield from source.at(*_CALL_ENDS)):
            yield from source.take(*_ENDS)
        elif _is_cut(source):
            source.pos = source.end
        else:
            raise Malformed("text follows the arguments")
        calls.add(name, object_arguments(arguments))

    def _step_skipping(self) -> bool:
        source = self._source
        hit = _CALL_STOPS.find(source.text, source.pos, source.end)
        stop = hit.start if hit else source.end
        if hit is None and not source.ended:
            stop = _CALL_STOPS.partial(source.text, source.pos, source.end)
        self._piece(Rail.PROTOCOL, stop)
        if hit is not None:
            self._piece(Rail.PROTOCOL, hit.end if hit.marker in _ENDS else hit.start)
            self._state = _State.BETWEEN
        return hit is not None

    # -- output

    def _say(self, stop: int) -> None:
        """Text of the current message up to `stop`."""
        source = self._source
        if self._is_thinking:
            self._rails.think(source.text[source.pos : stop])
            source.pos = stop
        else:
            self._piece(Rail.CONTENT, stop)

    def _piece(self, rail: Rail, stop: int) -> None:
        source = self._source
        self._rails.put(rail, source.text[source.pos : stop])
        source.pos = stop

    def _protocol(self, text: str) -> None:
        calls = self._calls.take()
        self._call_length += len(text)
        self._rails.put(Rail.PROTOCOL, text, calls if self._tools else ())

    def _fail(self, reason: str) -> None:
        self._protocol(self._source.close())
        self._state = _State.SKIPPING
        if self._tools:
            self.failures.append(
                CallFailure(
                    format="harmony",
                    reason=reason,
                    name=self._calls.last_name,
                    length=self._call_length,
                )
            )

    _STEPS: ClassVar[Mapping[_State, Callable[[Self], bool]]] = {
        _State.BETWEEN: _step_between,
        _State.HEADER: _step_header,
        _State.TEXT: _step_text,
        _State.CALL: _step_call,
        _State.SKIPPING: _step_skipping,
    }


def _is_cut(source: Source) -> bool:
    """Whether the stream ended where a message's end was expected or half written."""
    rest = source.text[source.pos : source.end]
    return source.ended and any(end.startswith(rest) for end in _CALL_ENDS)
