"""One answer on the terminal: text to stdout as it comes, thinking dim on stderr, a stats line.

In: an iterator of `Delta`. Out: `Answer`, whole or interrupted. Ctrl-C while it runs ends
this answer only (the request is cancelled); what to do next is the caller's affair.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from osaurus.cli.client import Delta
from osaurus.cli.terminal import dim


@dataclass(slots=True)
class Answer:
    """What came, and when. Times are seconds from the request to the piece."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_piece_s: float | None = None
    last_piece_s: float = 0.0
    is_interrupted: bool = False
    shows_prefill: bool = False  #: the terminal's line is taken by a percentage

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate between the first and the last piece; None when nothing was timed."""
        tokens = int(self.usage.get("completion_tokens") or 0)
        if self.first_piece_s is None or tokens < 2 or self.last_piece_s <= self.first_piece_s:
            return None
        return (tokens - 1) / (self.last_piece_s - self.first_piece_s)

    def stats(self) -> dict[str, Any]:
        """Stable keys for `--json`; an unknown figure is None, never zero."""
        details = self.usage.get("prompt_tokens_details") or {}
        return {
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens"),
            "completion_tokens": self.usage.get("completion_tokens"),
            "ttft_ms": None if self.first_piece_s is None else round(1e3 * self.first_piece_s, 1),
            "tokens_per_second": self.tokens_per_second and round(self.tokens_per_second, 1),
        }

    def stats_line(self) -> str:
        stats = self.stats()
        parts = []
        if stats["prompt_tokens"] is not None:
            cached = stats["cached_tokens"]
            parts.append(
                f"prompt {stats['prompt_tokens']} tokens"
                + (f" ({cached} cached)" if cached else "")
            )
        if stats["completion_tokens"] is not None:
            parts.append(f"answer {stats['completion_tokens']} tokens")
        if stats["ttft_ms"] is not None:
            parts.append(f"first token {stats['ttft_ms']:.0f} ms")
        if stats["tokens_per_second"]:
            parts.append(f"{stats['tokens_per_second']:.1f} tok/s")
        if self.is_interrupted:
            parts.append("interrupted")
        elif self.finish_reason and self.finish_reason != "stop":
            parts.append(f"ended by {self.finish_reason}")
        return ", ".join(parts)


def show_answer(deltas: Generator[Delta], *, quiet: bool = False) -> Answer:
    """Consume `deltas`, printing unless `quiet`; always leaves the cursor on a new line."""
    answer = Answer()
    started = time.monotonic()
    try:
        for delta in deltas:
            if delta.text or delta.reasoning:
                answer.last_piece_s = time.monotonic() - started
                if answer.first_piece_s is None:
                    answer.first_piece_s = answer.last_piece_s
            _take(answer, delta, quiet)
    except KeyboardInterrupt:
        answer.is_interrupted = True
    finally:
        deltas.close()
        if not quiet:
            _finish_line(answer)
    return answer


def _take(answer: Answer, delta: Delta, quiet: bool) -> None:
    if not quiet and sys.stderr.isatty():
        _show_prefill(answer, delta)
    if delta.reasoning:
        answer.reasoning += delta.reasoning
        if not quiet:
            print(dim(delta.reasoning, sys.stderr), end="", file=sys.stderr, flush=True)
    if delta.text:
        if answer.reasoning and not answer.text and not quiet:
            print(file=sys.stderr)
        answer.text += delta.text
        if not quiet:
            print(delta.text, end="", flush=True)
    answer.finish_reason = delta.finish_reason or answer.finish_reason
    answer.usage = delta.usage or answer.usage


def _show_prefill(answer: Answer, delta: Delta) -> None:
    """One line that is overwritten while a prompt is read, and gone when text comes."""
    if delta.prefill_percent is not None and delta.prefill_percent < 100:
        print(f"\r\x1b[Kreading {delta.prefill_percent:.0f} %", end="", file=sys.stderr, flush=True)
        answer.shows_prefill = True
    elif answer.shows_prefill:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        answer.shows_prefill = False


def _finish_line(answer: Answer) -> None:
    if answer.shows_prefill:  # interrupted before the first token
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if answer.text and not answer.text.endswith("\n"):
        print(flush=True)
    elif answer.reasoning and not answer.text:
        print(file=sys.stderr)
