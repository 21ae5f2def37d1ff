"""Measure any OpenAI-compatible server the way its users feel it: streams over HTTP.

In: an address and a model id. Token counts are the server's own usage, never a count of
frames; a server that sends no usage yields no speed. Arrival times are the client's. Every
prompt begins with a word that no server has seen, since many remember prompts, also on disk; a
prompt that was meant to be new and came from a cache all the same yields no figure.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx2

from osaurus.bench.workloads import DidNotRun, Measurement, NotRun, Outcome, random_words

_STORY = "Write a long story about a sailor and the sea. Use many sentences."
#: Neighbour streams while a long prompt arrives, and the answer length that outlasts it.
_RUNNING_STREAMS = 4
_RUNNING_TOKENS_FACTOR = 4
#: Of a new prompt: a server may keep what its template writes before every user's text.
_MAX_COLD_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One streamed answer. `times` are arrivals of text, seconds on the same clock as
    `started`; `completion_tokens` and `prompt_tokens` come from usage."""

    started: float
    times: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.started

    @property
    def tokens_per_s(self) -> float:
        if self.completion_tokens < 2 or self.times[-1] <= self.times[0]:
            raise DidNotRun(f"{self.completion_tokens} tokens in one piece give no rate")
        return (self.completion_tokens - 1) / (self.times[-1] - self.times[0])


class HttpLoad:
    """A client of one server. `on_text` is called at the arrival of each piece of text.
    `is_chat` False asks a model without a chat template to go on with the text itself;
    `extra` are further fields of every request's body."""

    def __init__(
        self,
        address: str,
        model: str,
        *,
        api_key: str | None = None,
        is_chat: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        self._url = address.rstrip("/").removesuffix("/v1") + path
        self._model = model
        self._is_chat = is_chat
        self._extra = dict(extra or {})
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(600, connect=5),
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def ask(
        self, content: str, max_tokens: int, *, on_text: Callable[[], None] | None = None
    ) -> Reply:
        """One greedy streamed answer. Raises `DidNotRun` with the server's own words."""
        messages = [{"role": "user", "content": content}]
        body = {
            "model": self._model,
            **({"messages": messages} if self._is_chat else {"prompt": content}),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        times: list[float] = []
        usage: Mapping[str, Any] = {}
        started = time.perf_counter()
        try:
            with self._http.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    detail = response.read()[:200].decode("utf-8", "replace")
                    raise DidNotRun(f"the server answered {response.status_code}: {detail}")
                for event in httpx2.EventSource(response):
                    if event.data == "[DONE]":
                        break
                    frame = json.loads(event.data)
                    usage = frame.get("usage") or usage
                    if _has_text(frame):
                        times.append(time.perf_counter())
                        if on_text:
                            on_text()
        except httpx2.HTTPError as error:
            raise DidNotRun(f"the connection failed: {error}") from error
        if not usage.get("completion_tokens"):
            raise DidNotRun("the server sent no usage: frames are not tokens")
        if not times:
            raise DidNotRun("no text came")
        return Reply(
            started=started,
            times=tuple(times),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage["completion_tokens"]),
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        )

    def ask_all(self, contents: Sequence[str], max_tokens: int) -> tuple[list[Reply], float]:
        """All at once, one thread each; the replies and the seconds until the last ended."""
        replies: list[Reply | None] = [None] * len(contents)
        failures: list[DidNotRun] = []

        def work(index: int) -> None:
            try:
                replies[index] = self.ask(contents[index], max_tokens)
            except DidNotRun as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(contents))]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - started
        if failures:
            raise failures[0]
        return [reply for reply in replies if reply is not None], elapsed


def measure_http(
    load: HttpLoad,
    *,
    rounds: int,
    new_tokens: int,
    streams: Sequence[int],
    prefix_words: int,
    seed: int,
) -> list[Outcome]:
    """The user's figures: first token short, cold and repeated; decode alone and together;
    the longest gap of running streams while a long prompt arrives. One warm-up first."""
    random = Random(seed)
    load.ask("Hello", 8)
    single = [load.ask(_story(random), new_tokens) for _ in range(rounds)]
    results: list[Outcome] = [
        Measurement(
            workload="first token, short prompt",
            unit="ms",
            values=tuple(1e3 * reply.ttft_s for reply in single),
        ),
        _measured("decode 1 stream", "tok/s", lambda: [r.tokens_per_s for r in single]),
    ]
    for count in streams:
        if count > 1:
            results.append(
                _measured(
                    f"decode {count} streams",
                    "tok/s",
                    lambda n=count: [
                        _total_rate(load, random, n, new_tokens) for _ in range(rounds)
                    ],
                )
            )
    results.extend(_long_prompts(load, random, rounds, prefix_words))
    results.append(
        _measured(
            "longest gap while a long prompt arrives",
            "ms",
            lambda: [_worst_gap(load, random, new_tokens, prefix_words) for _ in range(rounds)],
        )
    )
    return results


def _measured(workload: str, unit: str, run: Callable[[], list[float]]) -> Outcome:
    try:
        return Measurement(workload=workload, unit=unit, values=tuple(run()))
    except DidNotRun as error:
        return NotRun(workload=workload, reason=error.message)


def _total_rate(load: HttpLoad, random: Random, count: int, new_tokens: int) -> float:
    prompts = [_story(random) for _ in range(count)]
    replies, elapsed = load.ask_all(prompts, new_tokens)
    return sum(reply.completion_tokens for reply in replies) / elapsed


def _story(random: Random) -> str:
    return _new(f"{_STORY} {random_words(random, 3)}.")


def _new(text: str) -> str:
    """`text` behind a word of its own: the seed repeats prompts from run to run."""
    return f"{secrets.token_hex(4)} {text}"


def _long_prompts(load: HttpLoad, random: Random, rounds: int, prefix_words: int) -> list[Outcome]:
    cold: list[float] = []
    warm: list[float] = []
    tokens = 0
    for _ in range(rounds):
        prefix = _new(random_words(random, prefix_words))
        first = load.ask(f"{prefix}\nWhich word came first?", 4)
        tokens = first.prompt_tokens
        if first.cached_tokens > _MAX_COLD_SHARE * tokens:
            reason = f"{first.cached_tokens} of {tokens} tokens of a new prompt came from a cache"
            return [NotRun(workload="first token, long prompt", reason=reason)]
        cold.append(1e3 * first.ttft_s)
        warm.append(1e3 * load.ask(f"{prefix}\nWhich word came last?", 4).ttft_s)
    name = f"first token, {tokens} token prompt"
    return [
        Measurement(workload=f"{name}, cold", unit="ms", values=tuple(cold)),
        Measurement(workload=f"{name}, same prefix again", unit="ms", values=tuple(warm)),
    ]


def _worst_gap(load: HttpLoad, random: Random, new_tokens: int, prefix_words: int) -> float:
    """Milliseconds. The long prompt is sent once every neighbour has begun to answer, and
    must have its first token before the first neighbour ends."""
    all_running = threading.Barrier(_RUNNING_STREAMS + 1, timeout=120)
    replies: list[Reply] = []
    failures: list[DidNotRun] = []

    def neighbour(prompt: str) -> None:
        has_started = False

        def on_text() -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                all_running.wait()

        try:
            replies.append(load.ask(prompt, _RUNNING_TOKENS_FACTOR * new_tokens, on_text=on_text))
        except (DidNotRun, threading.BrokenBarrierError) as error:
            all_running.abort()
            failures.append(DidNotRun(f"a running stream ended: {error}"))

    prompts = [_story(random) for _ in range(_RUNNING_STREAMS)]
    threads = [threading.Thread(target=neighbour, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    arrival: Reply | None = None
    try:
        all_running.wait()
        arrival = load.ask(_new(random_words(random, prefix_words)), 2)
    except threading.BrokenBarrierError:
        failures.append(DidNotRun("the neighbour streams never ran side by side"))
    finally:
        for thread in threads:
            thread.join()
    if failures or arrival is None:
        raise failures[0]
    if min(reply.times[-1] for reply in replies) < arrival.times[0]:
        raise DidNotRun("a running stream ended before the long prompt was read")
    gaps = [b - a for reply in replies for a, b in zip(reply.times, reply.times[1:], strict=False)]
    return 1e3 * max(gaps)


def _has_text(frame: Mapping[str, Any]) -> bool:
    for choice in frame.get("choices") or []:
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False
