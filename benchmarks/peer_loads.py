"""What every server is asked, over HTTP and by the same client.

A `Load` draws its texts once a round, so that all servers read the same ones; `run` asks one
server and yields figures by name. Times are the client's, token counts the server's own usage.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from osaurus.bench.load import HttpLoad, Reply
from osaurus.bench.workloads import DidNotRun, random_words, shared_decode_rate

_STORY = "\nWrite a long story about a sailor and the sea. Use many sentences."
_RUNNING_STREAMS = 4
#: Longer than any newcomer takes; the streams are hung up once it has begun to answer.
_RUNNING_TOKENS = 1500
_BEGIN_TIMEOUT_S = 10
#: Of a prompt that no server may know: a template's own words are known to all.
_MAX_COLD_SHARE = 0.25
_ENOUGH_OF_ANSWER = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Random words behind one that nobody has seen, as many as make `tokens` in all."""

    encode: Callable[[str], int]
    overhead_tokens: int
    random: Random

    def new(self, tokens: int) -> str:
        room = tokens - self.overhead_tokens - self.encode(_STORY)
        head = f"{secrets.token_hex(4)} "
        words = random_words(self.random, max(room, 0)).split()
        while words and self.encode(head + " ".join(words)) > room:
            words = words[: max(len(words) - 8, int(0.97 * len(words)))]
        return head + " ".join(words) + _STORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`units` by figure; `draw` makes the round's texts, `run` asks one server."""

    name: str
    units: Mapping[str, str]
    draw: Callable[[Text], list[str]]
    run: Callable[[HttpLoad, list[str]], Mapping[str, float]]


def prefill(tokens: int) -> Load:
    """Prompt tokens by the time to the first text of the answer."""
    rate, wait = f"prefill {tokens:,}", f"first token after {tokens:,}"

    def run(load: HttpLoad, texts: list[str]) -> Mapping[str, float]:
        reply = _cold(load.ask(texts[0], 4))
        return {rate: reply.prompt_tokens / reply.ttft_s, wait: 1e3 * reply.ttft_s}

    return Load(
        name=rate,
        units={rate: "tok/s", wait: "ms"},
        draw=lambda text: [text.new(tokens)],
        run=run,
    )


def decode(context: int, new_tokens: int) -> Load:
    """One answer behind a context. The text is the same in all rounds: caches may know it."""
    name = f"decode at {context:,}"
    kept: list[str] = []

    def draw(text: Text) -> list[str]:
        if not kept:
            kept.append(text.new(context))
        return kept

    def run(load: HttpLoad, texts: list[str]) -> Mapping[str, float]:
        return {name: _whole(load.ask(texts[0], new_tokens), new_tokens).tokens_per_s}

    return Load(name=name, units={name: "tok/s"}, draw=draw, run=run)


def streams(count: int, prompt: int, new_tokens: int) -> Load:
    """All at once; tokens of all answers by the time until the last ended, prompts included,
    and those of the time in which all of them were being answered by that time."""
    name = f"{count} x {prompt:,}+{new_tokens}"
    decoding = f"{name}, while all decode"

    def run(load: HttpLoad, texts: list[str]) -> Mapping[str, float]:
        replies, elapsed = load.ask_all(texts, new_tokens)
        total = sum(_whole(reply, new_tokens).completion_tokens for reply in replies)
        # A piece of text may be more or less than a token; the server counts tokens.
        pieces = sum(len(reply.times) for reply in replies)
        try:
            together = shared_decode_rate([reply.times for reply in replies]) * total / pieces
        except DidNotRun:
            return {name: total / elapsed}
        return {name: total / elapsed, decoding: together}

    return Load(
        name=name,
        units={name: "tok/s", decoding: "tok/s"},
        draw=lambda text: [text.new(prompt) for _ in range(count)],
        run=run,
    )


def mixed(prompt: int) -> Load:
    """A long prompt alone, then one that arrives while four streams run."""
    gap, alone, among, factor = (
        "longest gap of 4 streams",
        f"first token of {prompt:,} alone",
        f"first token of {prompt:,} among 4",
        "newcomer, among by alone",
    )

    def run(load: HttpLoad, texts: list[str]) -> Mapping[str, float]:
        solo = _cold(load.ask(texts[0], 2)).ttft_s
        longest, arrival = _arrival_among(load, texts[2:], texts[1])
        return {
            gap: 1e3 * longest,
            alone: 1e3 * solo,
            among: 1e3 * arrival.ttft_s,
            factor: arrival.ttft_s / solo,
        }

    return Load(
        name="mixed",
        units={gap: "ms", alone: "ms", among: "ms", factor: "times"},
        draw=lambda text: [
            text.new(prompt),
            text.new(prompt),
            *(text.new(64) for _ in range(_RUNNING_STREAMS)),
        ],
        run=run,
    )


class _HangUp(Exception):
    """Ends a stream from its own callback: leaving the response closes the connection."""


class _Neighbour(threading.Thread):
    """A stream that runs until it is told to end; `times` are arrivals of its text."""

    def __init__(self, load: HttpLoad, text: str) -> None:
        super().__init__()
        self._load, self._text = load, text
        self.times: list[float] = []
        self.has_begun = threading.Event()
        self.is_over = False
        self.failure: DidNotRun | None = None

    def run(self) -> None:
        def on_text() -> None:
            self.times.append(time.perf_counter())
            self.has_begun.set()
            if self.is_over:
                raise _HangUp

        try:
            self._load.ask(self._text, _RUNNING_TOKENS, on_text=on_text)
        except _HangUp:
            return
        except DidNotRun as error:
            self.failure = error
        finally:
            self.has_begun.set()


def _arrival_among(load: HttpLoad, texts: list[str], newcomer: str) -> tuple[float, Reply]:
    """Seconds of the longest gap between the newcomer's sending and the streams' first text
    after its answer began."""
    neighbours = [_Neighbour(load, text) for text in texts]
    for neighbour in neighbours:
        neighbour.start()
    try:
        begun_by = time.monotonic() + _BEGIN_TIMEOUT_S
        for neighbour in neighbours:
            if not neighbour.has_begun.wait(max(0.0, begun_by - time.monotonic())):
                raise DidNotRun("four requests do not run side by side: one waits for another")
        reply = _cold(load.ask(newcomer, 2))
    finally:
        for neighbour in neighbours:
            neighbour.is_over = True
        for neighbour in neighbours:
            neighbour.join()
    longest = 0.0
    for neighbour in neighbours:
        if neighbour.failure:
            raise DidNotRun(f"a running stream ended: {neighbour.failure.message}")
        times = neighbour.times
        if not times or times[0] > reply.started or times[-1] < reply.times[0]:
            raise DidNotRun("the streams did not run while the long prompt was read")
        gaps = [b - a for a, b in pairwise(times) if b > reply.started]
        longest = max(longest, *gaps)
    return longest, reply


def _cold(reply: Reply) -> Reply:
    if reply.cached_tokens > _MAX_COLD_SHARE * reply.prompt_tokens:
        raise DidNotRun(f"{reply.cached_tokens} of {reply.prompt_tokens} tokens came from a cache")
    return reply


def _whole(reply: Reply, tokens: int) -> Reply:
    if reply.completion_tokens < _ENOUGH_OF_ANSWER * tokens:
        raise DidNotRun(f"an answer ended after {reply.completion_tokens} of {tokens} tokens")
    return reply
