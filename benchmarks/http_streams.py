#!/usr/bin/env python3
"""What the server itself adds: latency and CPU per token, and how fast a hang-up is heard.

usage: PYTHONPATH=src:tests python benchmarks/http_streams.py [--streams 200] [--rate 20]
       [--seconds 20] [--disconnects 1000] [--burst] [--json FILE]

An engine that computes nothing says at each step when it did so; the client, a process of its
own, compares that with the moment of arrival on the same clock. Streams keep their own time;
with --burst all say their token at the same moment, as one batch does. CPU is that of the server
process less what the engine's thread takes alone, over the tokens that it sent.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import psutil

_TIMES = re.compile(rb"(\d+) ")
_CONTENT = re.compile(rb'"content":"([^"]*)"')


def serve(rate: float, is_burst: bool) -> None:
    """The server's process: prints its address, ends when stdin closes, prints what it heard."""
    from api.scripted_engine import (  # pyright: ignore[reportMissingImports] - tests are on the path
        ByteTokenizer,
        ScriptedEngine,
        ScriptedSource,
    )
    from osaurus.engine.client import Mailbox, Stream
    from osaurus.server.serve import ServerConfig, running_server
    from osaurus.types.engine import CapacitySnapshot, EventStream, GenerationRequest
    from osaurus.types.events import Info

    class Clock(ByteTokenizer):
        """Token ids past the bytes are microseconds."""

        def token_bytes(self, token_id: int) -> bytes:
            return b"%d " % token_id if token_id > 1000 else super().token_bytes(token_id)

    class PacedEngine(ScriptedEngine):
        """One thread for all streams, as a batch engine has."""

        def __init__(self) -> None:
            super().__init__()
            self.max_batch_size = 4096
            self.heard: dict[int, float] = {}
            self.cpu_s = 0.0
            self._due: list[tuple[float, int, Any]] = []
            self._count = 0
            self._cancelled_choices: set[int] = set()
            threading.Thread(target=self._pace, daemon=True).start()

        def generate(self, request: GenerationRequest) -> list[EventStream]:
            mailbox = Mailbox()
            number = int(bytes(b for b in request.token_ids if 48 <= b < 58) or b"0")

            def cancel() -> None:
                self.heard.setdefault(number, time.monotonic())
                self._cancelled_choices.add(key)

            with self._changed:
                self._count += 1
                key = self._count
                state = [request, request.make_output(), mailbox, 0]
                first = time.monotonic() + 1 / rate
                if is_burst:
                    first = (int(time.monotonic() * rate) + 2) / rate
                heapq.heappush(self._due, (first, key, state))
                self._changed.notify_all()
            return [Stream(request.request_id, mailbox, cancel)]

        def capacity_snapshot(self) -> CapacitySnapshot:
            return CapacitySnapshot(
                configured_maximum=4096,
                active_count=len(self._due),
                pending_count=0,
                active_count_high_watermark=0,
                is_accepting_requests=True,
                is_shutdown=False,
            )

        def shutdown(self) -> None:
            pass

        def _pace(self) -> None:
            while True:
                with self._changed:
                    while not self._due or self._due[0][0] > time.monotonic():
                        wait = self._due[0][0] - time.monotonic() if self._due else None
                        self._changed.wait(wait)
                    at, key, state = heapq.heappop(self._due)
                started = time.thread_time()
                self._say(at, key, state)
                self.cpu_s += time.thread_time() - started

        def _say(self, at: float, key: int, state: list[Any]) -> None:
            request, output, mailbox, count = state
            ended = key in self._cancelled_choices
            if not ended:
                for event in output.push(int((time.monotonic() - base) * 1e6) + 1001):
                    mailbox.put(event)
                state[3] = count + 1
                ended = state[3] >= (request.params.max_tokens or 1 << 30)
            if not ended:
                with self._changed:
                    heapq.heappush(self._due, (at + 1 / rate, key, state))
                return
            self._cancelled_choices.discard(key)
            for event in output.finish():
                mailbox.put(event)
            mailbox.put(Info(prompt_tokens=len(request.token_ids), generated_tokens=state[3]))
            mailbox.mark_drained()

    base = time.monotonic()
    engine = PacedEngine()
    source = ScriptedSource({"m": engine}, tokenizer=Clock())
    with running_server(source, ServerConfig(port=0, inference_limit=5000)) as url:
        print(json.dumps({"url": url, "base": base}), flush=True)
        for line in sys.stdin:
            if line.strip() == "cpu":
                total = sum(psutil.Process().cpu_times()[:2])
                print(json.dumps({"total": total, "engine": engine.cpu_s}), flush=True)
            elif line.strip() == "heard":
                print(json.dumps(engine.heard), flush=True)
            else:
                break


class Server:
    def __init__(self, rate: float, is_burst: bool) -> None:
        command = [sys.executable, __file__, "--serve", "--rate", str(rate)]
        self._process = subprocess.Popen(
            [*command, *(["--burst"] if is_burst else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self._read()
        self.url, self.base = hello["url"], hello["base"]
        self.port = int(self.url.rpartition(":")[2])
        self.process = psutil.Process(self._process.pid)

    def ask(self, what: str) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _read(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


async def _open(port: int, number: int, max_tokens: int) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": str(number)}],
            "stream": True,
            "max_tokens": max_tokens,
        }
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await writer.drain()
    return reader, writer


async def _stream(server: Server, number: int, tokens: int, latencies: list[float]) -> None:
    reader, writer = await _open(server.port, number, tokens)
    while line := await reader.readline():
        now = time.monotonic()
        if line.startswith(b"data: [DONE]"):
            break
        for text in _CONTENT.findall(line):
            for stamp in _TIMES.findall(text):
                latencies.append(now - server.base - (int(stamp) - 1001) / 1e6)
    writer.close()


async def measure_streams(server: Server, streams: int, rate: float, seconds: float) -> Any:
    tokens = int(rate * seconds)
    before = server.ask("cpu")
    latencies: list[float] = []

    async def one(number: int) -> None:
        await asyncio.sleep(number / streams / rate * 20)  # their own phases
        await _stream(server, number, tokens, latencies)

    await asyncio.gather(*(one(i + 1) for i in range(streams)))
    after = server.ask("cpu")
    total = after["total"] - before["total"]
    engine = after["engine"] - before["engine"]
    ordered = sorted(latencies)
    return {
        "streams": streams,
        "tokens_per_s_each": rate,
        "tokens": len(latencies),
        "latency_ms": {
            name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        },
        "server_cpu_s_per_1000_tokens": round(1000 * (total - engine) / len(latencies), 4),
        "engine_thread_cpu_s_per_1000_tokens": round(1000 * engine / len(latencies), 4),
    }


async def measure_disconnects(server: Server, count: int) -> Any:
    handles, threads = server.process.num_fds(), server.process.num_threads()
    closed: dict[str, float] = {}

    async def one(number: int, lane: asyncio.Semaphore) -> None:
        async with lane:
            reader, writer = await _open(server.port, number, 1_000_000)
            while _TIMES.search(await reader.readline()) is None:
                pass
            closed[str(number)] = time.monotonic()
            writer.close()

    lane = asyncio.Semaphore(50)
    await asyncio.gather(*(one(10_000 + i, lane) for i in range(count)))
    heard: Mapping[str, float] = {}
    for _ in range(100):
        heard = server.ask("heard")
        if all(number in heard for number in closed):
            break
        await asyncio.sleep(0.05)
    took = sorted(heard[number] - at for number, at in closed.items() if number in heard)
    health: Any = {}
    for _ in range(100):
        health = httpx2.get(f"{server.url}/health").json()
        if not health["inflight"] and not health["http_inflight"]:
            break
        await asyncio.sleep(0.05)
    return {
        "disconnects": count,
        "heard": len(took),
        "cancel_ms": {
            "median": round(1000 * statistics.median(took), 1),
            "p99": round(1000 * took[int(0.99 * len(took))], 1),
            "max": round(1000 * took[-1], 1),
        },
        "left": {
            "leases": sum(health["inflight"].values()),
            "admitted": health["http_inflight"],
            "file_handles": server.process.num_fds() - handles,
            "threads": server.process.num_threads() - threads,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve(options.rate, options.burst)
        return
    server = Server(options.rate, options.burst)
    try:
        found = {
            "streams": asyncio.run(
                measure_streams(server, options.streams, options.rate, options.seconds)
            )
        }
        if options.disconnects:
            found["disconnects"] = asyncio.run(measure_disconnects(server, options.disconnects))
    finally:
        server.close()
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
