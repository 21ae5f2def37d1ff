"""Twenty clients against one server with the default model and three tiny ones.

    python scripts/soak.py --seconds 60 [--seed N]

They ask, stream, hang up, change settings, load and unload. The first third, at most a minute,
warms up: then everything is unloaded and what the process holds is the baseline. After the rest
it is unloaded again, and must hold no lease, no more threads, files and tasks, and at most 50 MB
more. Every answer must be what was asked for: the tiny models' greedy ones word for word as when
asked alone. Prints figures as JSON; exit code 1 with the faults on stderr otherwise. Its pytest
twin is `tests/test_soak.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from soak_models import make_models

from osaurus.bundle.hub import find_model

NUM_CLIENTS = 20
MAX_GROWTH_BYTES = 50_000_000
PATIENCE_S = 180.0
MAX_FAULTS_SHOWN = 20

PROMPTS = (
    "Name three colours.",
    "What is the capital of France?",
    "Count to ten. " * 12,
    "Tell me about the sea. " * 30,
)
#: What some client sets every few seconds; the second kind makes models load anew.
LIVE_CHANGES: tuple[dict[str, Any], ...] = (
    {"concurrency": {"maxConcurrentSequences": 2}},
    {"concurrency": {"maxConcurrentSequences": 8}},
    {"concurrency": {"maxConcurrentSequences": "auto"}},
    {"generation": {"maxTokens": 12, "temperature": 0.4}},
    {"generation": {"maxTokens": None, "temperature": None}},
    {"generation": {"streamInterval": 4}},
    {"generation": {"streamInterval": 1}},
    {"guardrails": {"degenerationDetection": True}},
    {"guardrails": {"degenerationDetection": False}},
    {"residency": {"mode": "immediately"}},
    {"residency": {"mode": "after_seconds", "seconds": 30}},
    {"residency": {"mode": "never"}},
    {"residency": {"evictionPolicy": "strict_single_model"}},
    {"residency": {"evictionPolicy": "manual_multi_model"}},
    {"residency": {"evictionPolicy": "manual_multi_model"}},
)
LOAD_CHANGES: tuple[dict[str, Any], ...] = (
    {"concurrency": {"prefillStepSize": 64}},
    {"concurrency": {"prefillStepSize": None}},
    {"performance": {"latencyBudgetMs": 20}},
    {"concurrency": {"completionBatchSize": 3, "prefillBatchSize": 1}},
    {"concurrency": {"completionBatchSize": None, "prefillBatchSize": None}},
    {"power": {"autoSleepEnabled": True, "lightSleepAfterSeconds": 0.5}},
    {"power": {"autoSleepEnabled": False}},
    {"cache": {"pagedKV": {"enabled": False}}},
    {"cache": {"pagedKV": {"enabled": None}}},
    {"memorySafety": {"mode": "balanced"}},
    {"memorySafety": {"mode": "safe_auto"}},
)
WRONG_CHANGES: tuple[dict[str, Any], ...] = (
    {"generation": {"temperature": 9}},
    {"network": {"port": 5}},
    {"residency": {"seconds": 1}},
)


@dataclass
class Tally:
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        self.done["fault"] += 1
        self.faults.append(text)


class Wrong(Exception):
    """A client saw what it should not have seen."""


@dataclass
class Client:
    """One of the twenty; `answers` are those of the tiny models, alone, by model and prompt."""

    http: httpx2.AsyncClient
    models: list[str]
    answers: dict[tuple[str, str], str]
    tally: Tally
    random: random.Random

    async def run(self, until: float) -> None:
        acts = (
            (self.ask, 10), (self.stream, 12), (self.hang_up, 6), (self.hang_up_early, 3),
            (self.change, 2), (self.change_load, 0.4), (self.change_wrongly, 1),
            (self.unload, 0.6), (self.preload, 1), (self.look, 3), (self.ask_wrongly, 1),
        )  # fmt: skip
        choices: list[Callable[[], Awaitable[str]]] = [act for act, _ in acts]
        weights = [weight for _, weight in acts]
        while time.monotonic() < until:
            (act,) = self.random.choices(choices, weights)
            name = act.__name__
            try:
                outcome = await asyncio.wait_for(act(), PATIENCE_S)
                self.tally.done[f"{name}: {outcome}"] += 1
            except (Wrong, httpx2.HTTPError, ValueError, LookupError) as error:
                self.tally.fault(f"{name}: {type(error).__name__}: {error}"[:500])
            except TimeoutError:
                self.tally.fault(f"{name}: nothing happened for {PATIENCE_S:g} s")
            await asyncio.sleep(self.random.random() * 0.1)

    def body(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.random.choice(PROMPTS)}]
        model = self.random.choice(self.models)
        return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16, **fields}

    async def ask(self) -> str:
        if self.random.random() < 0.5:
            return await self._ask(self.body())
        seed = self.random.randrange(1000)
        return await self._ask(self.body(temperature=1, seed=seed, n=self.random.randint(1, 2)))

    async def _ask(self, body: dict[str, Any]) -> str:
        answer = await self.http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return _refused(answer.status_code, answer.headers, answer.json())
        given = answer.json()
        usage = given["usage"]
        for choice in given["choices"]:
            self._check(body, choice["message"]["content"] or "", choice["finish_reason"])
        # None at all, where the first token that was drawn ends the answer.
        limit = body["max_tokens"] * len(given["choices"])
        if given["model"] != body["model"] or not 0 <= usage["completion_tokens"] <= limit:
            raise Wrong(f"not what was asked for: {given['model']}, {usage}")
        return "answered"

    async def stream(self) -> str:
        return await self._stream(self.body(stream=True), stop_after=None)

    async def hang_up(self) -> str:
        body = self.body(stream=True, max_tokens=200)
        return await self._stream(body, stop_after=self.random.randint(1, 4))

    async def hang_up_early(self) -> str:
        """Before anything came: in the queue, during a load or the prompt."""
        body = self.body(stream=self.random.random() < 0.5, max_tokens=200)
        try:
            async with asyncio.timeout(self.random.random() * 0.3):
                return await (self._stream(body, None) if body["stream"] else self._ask(body))
        except TimeoutError:
            return "hung up"

    async def _stream(self, body: dict[str, Any], stop_after: int | None) -> str:
        text, reason, num_chunks = "", None, 0
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                return _refused(
                    answer.status_code, answer.headers, json.loads(await answer.aread())
                )
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    self._check(body, text, reason)
                    return "answered"
                if not line.startswith("data: "):
                    continue
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    raise Wrong(f"the stream broke: {frame['error']}")
                for choice in frame["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
                num_chunks += 1
                if stop_after is not None and num_chunks >= stop_after:
                    return "hung up"
        raise Wrong("the stream ended without [DONE]")

    def _check(self, body: dict[str, Any], text: str, reason: str | None) -> None:
        if reason not in ("stop", "length"):
            raise Wrong(f"finish_reason {reason!r}")
        alone = self.answers.get((body["model"], body["messages"][0]["content"]))
        if alone is not None and body["temperature"] == 0 and body["max_tokens"] == 16:
            self.tally.done["compared with the answer alone"] += 1
            if text != alone:
                raise Wrong(f"{body['model']} answered {text!r}, alone {alone!r}")

    async def ask_wrongly(self) -> str:
        kind = self.random.choice(("model", "length", "field"))
        wrong: dict[str, dict[str, Any]] = {
            "model": {"model": "soak/nobody"},
            "length": {"messages": [{"role": "user", "content": "word " * 40_000}]},
            "field": {"temperature": 11},
        }
        answer = await self.http.post("/v1/chat/completions", json=self.body() | wrong[kind])
        codes = {
            "model": (404, "model_not_found"),
            "length": (400, "context_length_exceeded"),
            "field": (400, "invalid_value"),
        }
        found = (answer.status_code, answer.json()["error"]["code"])
        if found == (503, "server_overloaded"):
            return "overloaded"
        if found != codes[kind]:
            raise Wrong(f"{kind}: {found}")
        return found[1]

    async def change(self) -> str:
        return await self._change(self.random.choice(LIVE_CHANGES), 200)

    async def change_load(self) -> str:
        return await self._change(self.random.choice(LOAD_CHANGES), 200)

    async def change_wrongly(self) -> str:
        return await self._change(self.random.choice(WRONG_CHANGES), 400)

    async def _change(self, settings: dict[str, Any], status: int) -> str:
        answer = await self.http.patch("/admin/runtime-settings", json=settings)
        if answer.status_code != status:
            raise Wrong(f"{settings}: {answer.status_code} {answer.text[:200]}")
        return "changed" if status == 200 else "refused"

    async def preload(self) -> str:
        model = self.random.choice(self.models)
        return _ok(await self.http.post("/admin/preload", json={"model": model}))

    async def unload(self) -> str:
        body = self.random.choice((None, {"model": self.random.choice(self.models)}))
        return _ok(await self.http.post("/admin/unload", json=body))

    async def look(self) -> str:
        path = self.random.choice(("/health", "/v1/models", "/admin/cache-stats"))
        return _ok(await self.http.get(path))


def _ok(answer: httpx2.Response) -> str:
    if answer.status_code != 200:
        raise Wrong(f"{answer.request.url.path}: {answer.status_code} {answer.text[:200]}")
    return "ok"


def _refused(status: int, headers: httpx2.Headers, body: Any) -> str:
    """The one refusal that a client may see who asked for nothing wrong: too many at once."""
    code = body["error"]["code"]
    if (status, code) != (503, "server_overloaded") or "retry-after" not in headers:
        raise Wrong(f"{status}: {body['error']}")
    return "overloaded"


class Server:
    """The child process: its address, and what it holds."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url

    async def held(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), 60))

    async def at_rest(self, baseline: dict[str, Any] | None = None) -> dict[str, Any]:
        """What is held once everything is unloaded and has ended; waits half a minute for it
        to be no more than `baseline`, or to be the same twice."""
        async with httpx2.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as http:
            (await http.post("/admin/unload")).raise_for_status()
        last = await self.held()
        for _ in range(60):
            await asyncio.sleep(0.5)
            now = await self.held()
            if baseline is None:
                is_quiet = _counts(now) == _counts(last)
            else:
                is_quiet = all(a <= b for a, b in zip(_counts(now), _counts(baseline), strict=True))
            last = now
            if is_quiet:
                break
        return last


def _counts(held: dict[str, Any]) -> tuple[int, int, int]:
    return len(held["threads"]), held["num_files"], len(held["tasks"])


@asynccontextmanager
async def serving(home: Path) -> AsyncGenerator[Server]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("soak_server.py")),
        env={
            **os.environ,
            "OSAURUS_HOME": str(home),
            "OSAURUS_MODELS_DIR": str(home / "models"),
            # Threads that spin on cores that others want make everything slow.
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
        },
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        yield Server(process, url)
        process.stdin.close()
        if await asyncio.wait_for(process.wait(), 60) != 0:
            raise SystemExit(f"the server ended with {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def soak(seconds: float, seed: int, home: Path) -> tuple[dict[str, Any], list[str]]:
    """Figures and faults."""
    default = find_model("default")
    folder = default.path if default.path.is_dir() else default.path.parent
    place = home / "models" / default.repo_id
    place.parent.mkdir(parents=True)
    place.symlink_to(folder.resolve(), target_is_directory=True)
    tiny = make_models(home / "models")
    tally, answers = Tally(), {}
    warm_s = min(60.0, seconds / 3)
    async with serving(home) as server:
        async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            alone = Client(http, [*tiny, default.model_id], {}, tally, random.Random(seed))
            for model in tiny:
                for prompt in PROMPTS:
                    body = alone.body(model=model, messages=[{"role": "user", "content": prompt}])
                    answer = await http.post("/v1/chat/completions", json=body)
                    answer.raise_for_status()
                    answers[model, prompt] = answer.json()["choices"][0]["message"]["content"] or ""
        await load(server, warm_s, seed, alone.models, answers, tally)
        before = await server.at_rest()
        # More rests than the last one show whether memory grows on or has settled.
        rests = [before]
        num_rests = max(1, round((seconds - warm_s) / 135))
        for number in range(1, num_rests + 1):
            length_s = (seconds - warm_s) / num_rests
            await load(server, length_s, seed + number, alone.models, answers, tally)
            rests.append(await server.at_rest(before))
        after = rests[-1]
        async with httpx2.AsyncClient(base_url=server.url) as http:
            health = (await http.get("/health")).json()
    faults = tally.faults + leaks(before, after, health)
    figures = {
        "seconds": seconds,
        "warm_up_s": warm_s,
        "seed": seed,
        "done": dict(sorted(tally.done.items())),
        "rss_mb": [round(held["rss_bytes"] / 1e6, 1) for held in rests],
        "threads_files_tasks": [_counts(before), _counts(after)],
        "faults": len(faults),
    }
    return figures, faults


async def load(
    server: Server,
    seconds: float,
    seed: int,
    models: list[str],
    answers: dict[tuple[str, str], str],
    tally: Tally,
) -> None:
    until = time.monotonic() + seconds

    async def one(number: int) -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            dice = random.Random(f"{seed}.{number}")
            await Client(http, models, answers, tally, dice).run(until)

    await asyncio.gather(*(one(number) for number in range(NUM_CLIENTS)))


def leaks(before: dict[str, Any], after: dict[str, Any], health: dict[str, Any]) -> list[str]:
    faults: list[str] = []
    for name in ("threads", "tasks"):
        if len(after[name]) > len(before[name]):
            extra = Counter(after[name]) - Counter(before[name])
            faults.append(f"{len(before[name])} {name} before, {len(after[name])} after: {extra}")
    if after["num_files"] > before["num_files"]:
        faults.append(f"{before['num_files']} files before, {after['num_files']} after")
    growth = after["rss_bytes"] - before["rss_bytes"]
    if growth > MAX_GROWTH_BYTES:
        faults.append(f"{growth / 1e6:.0f} MB more than at the end of the warm-up")
    for name in ("inflight", "loaded", "loading", "resident_models", "load_errors"):
        if health[name]:
            faults.append(f"/health: {name} is {health[name]}")
    for name in ("http_inflight", "chat_active", "inflight_load_bytes", "engines_failed"):
        if health[name] != 0:
            faults.append(f"/health: {name} is {health[name]}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="osaurus-soak-") as home:
        figures, faults = asyncio.run(soak(options.seconds, options.seed, Path(home)))
    print(json.dumps(figures, indent=2))
    for fault in faults[:MAX_FAULTS_SHOWN]:
        print(f"fault: {fault}", file=sys.stderr)
    if len(faults) > MAX_FAULTS_SHOWN:
        print(f"and {len(faults) - MAX_FAULTS_SHOWN} more", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
