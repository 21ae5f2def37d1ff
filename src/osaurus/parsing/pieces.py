"""What the output machine says about the text it was given: a partition into pieces.

Joined in order, the texts of all pieces are the machine's input, byte for byte. This is what
lets `output.py` say for each token whether it was shown, thought or protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from osaurus.types.events import ToolCall


class Rail(Enum):
    """Where a piece of text goes."""

    CONTENT = "content"  #: visible text
    REASONING = "reasoning"  #: thinking text
    THINK_MARK = "think_mark"  #: reasoning markers and blank blocks: dropped, counted as thinking
    PROTOCOL = "protocol"  #: a call's envelope: dropped, previewed
    NOISE = "noise"  #: orphan closers, line breaks that touch a call: dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """A broken or rejected envelope, for the typed status and for logs: never the payload."""

    format: str
    reason: str
    name: str | None  #: if it was read
    length: int  #: characters of the envelope that were read


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the input and its rail. `calls` are complete when this text is."""

    rail: Rail
    text: str
    calls: tuple[ToolCall, ...] = ()


class OutputMachine(Protocol):
    """Separates a response into rails and calls. One instance a choice.

    `push` returns pieces as soon as they are certain, `finish` the rest. Should either
    raise, `abandon` returns every piece still owed, unread input as content.
    """

    @property
    def in_reasoning(self) -> bool:
        """State after the last `push`."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether there are `failures`."""
        ...

    @property
    def failures(self) -> Sequence[CallFailure]:
        """The envelopes so far that were broken or rejected."""
        ...

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...

    def abandon(self) -> list[Piece]: ...
