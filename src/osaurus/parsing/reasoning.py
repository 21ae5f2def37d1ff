"""Reasoning envelopes: how each family marks its thinking, and where a response starts.

The formats are data; the machine applies them. Where a stream starts is read off the rendered
prompt, because templates open and close thinking blocks before the model speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import regex


class Start(Enum):
    """What the first token of a response belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"
    #: In a block whose header (Gemma's channel name) the prompt has begun but not ended.
    HEADER = "header"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Spellings of one envelope; the first opener and closer are the canonical ones.

    `header` matches what follows an opener and is no thought: a channel's name line. With
    `only_first` a block can only begin the message, and outside it the markers are text.
    """

    name: str
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    header: regex.Pattern[str] | None = None
    only_first: bool = False


_CHANNEL_NAME = regex.compile(r"[A-Za-z_]{0,32}\r?\n")

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat(name="think", openers=("<think>",), closers=("</think>",)),
        ReasoningFormat(
            name="hunyuan",
            openers=("<think>", "<think:opensource>"),
            closers=("</think>", "</think:opensource>"),
        ),
        ReasoningFormat(name="seed", openers=("<seed:think>",), closers=("</seed:think>",)),
        ReasoningFormat(name="bracket", openers=("[THINK]",), closers=("[/THINK]",)),
        ReasoningFormat(
            name="channel",
            # The second spelling was seen from one conversion of Gemma 4.
            openers=("<|channel>", "\u2b55thought\n"),
            closers=("<channel|>",),
            header=_CHANNEL_NAME,
        ),
        ReasoningFormat(
            name="sentence",
            openers=("Here is my thought process:", "Here's my thought process:"),
            closers=("Here is my response:", "Here's my response:"),
            only_first=True,
        ),
    )
}

#: How many prompt tokens decide the start; decode them with special tokens kept.
TAIL_TOKENS = 64

_HARMONY_ANALYSIS = regex.compile(r"<\|channel\|>\s*analysis[^<]*<\|message\|>")


def start_of(tail: str | None, reasoning: str | None, *, by_default: bool = False) -> Start:
    """Where a response starts whose prompt ends in `tail`, for the reasoning format's name.

    The last marker in the tail decides. Without any it starts in content, even when the
    family usually opens a block: a bare prompt must not hide the answer. Only when there is
    no tail to look at (None) the family's habit, `by_default`, counts.
    """
    if reasoning is None:
        return Start.CONTENT
    if tail is None:
        return Start.REASONING if by_default else Start.CONTENT
    if reasoning == "harmony":
        header = _last(tail, ("<|channel|>",))
        ended = _last(tail, ("<|end|>", "<|start|>", "<|return|>", "<|call|>"))
        is_open = header[0] > ended[0] and _HARMONY_ANALYSIS.match(tail, header[0])
        return Start.REASONING if is_open else Start.CONTENT
    envelope = REASONING_FORMATS[reasoning]
    opened, opener = _last(tail, envelope.openers)
    closed, _ = _last(tail, envelope.closers)
    if opened <= closed:
        return Start.CONTENT
    if envelope.header is not None and opener == envelope.openers[0]:
        behind = tail[opened + len(opener) :]
        return Start.REASONING if envelope.header.match(behind) else Start.HEADER
    return Start.REASONING


def _last(tail: str, markers: tuple[str, ...]) -> tuple[int, str]:
    return max((tail.rfind(marker), marker) for marker in markers)
