"""Raw bytes, half-closed sockets and half-said requests against the server, for a while.

    PYTHONPATH=src:tests python scripts/fuzz_http.py --seconds 300

Damages good requests to every route in every way a socket allows, many at a time. After each
round a good request must be answered; nothing may be a 5xx but what says so of itself (501, 503),
and at the end no lease, slot, thread or socket is left over. Prints the longest time that a good
request took. The pytest twin is `tests/api/test_raw_bytes.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec
import psutil

from api.scripted_engine import Say, ScriptedEngine, ScriptedSource
from osaurus.chat.service import ChatEngine
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.app import AppConfig, build_app
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import GenerationRequest
from osaurus.types.runtime import RuntimeSettings

_MESSAGES = [{"role": "user", "content": "hi"}]
_BODIES: dict[str, Any] = {
    "/chat/completions": {"model": "m", "messages": _MESSAGES, "stream": True},
    "/completions": {"model": "m", "prompt": "hi", "stream": True},
    "/responses": {"model": "m", "input": "hi", "stream": True},
    "/messages": {"model": "m", "max_tokens": 9, "messages": _MESSAGES, "stream": True},
    "/chat": {"model": "m", "messages": _MESSAGES},
    "/generate": {"model": "m", "prompt": "hi"},
}
_JUNK = (
    b"\x00", b"\r\n\r\n", b"\r\n", b"\n", b"\xff\xfe", b"%00", b"{" * 300, b"[" * 3000, b'"', b" ",
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: -1\r\n", b"Content-Length: 9999999999\r\n",
    b"Content-Length: 1\r\n", b"Expect: 100-continue\r\n", b"Connection: upgrade\r\n",
    b"Upgrade: websocket\r\n", b"Host: evil.example\r\n", b"X: " + b"y" * 70_000 + b"\r\n",
    b"ZZ\r\nabc\r\n", b"ffffffffffffffff\r\n", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00", "é🦖\u2028".encode(), b"1e999999", b"NaN", b"\\ud800",
)  # fmt: skip

#: How many connections are misbehaving at once.
_WIDTH = 24
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
#: What may be answered with 5xx: not served here, too much at once.
_HONEST_FAILURES = (501, 503)


@dataclass
class Findings:
    requests: int = 0
    slowest_s: float = 0.0
    statuses: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def fuzz(seconds: float, seed: int) -> Findings:
    """Misbehave for so long; what was found, faults among it."""
    found = Findings()
    rng = random.Random(seed)
    source = ScriptedSource({"m": ScriptedEngine(_talk)})
    config = ServerConfig(
        port=0, drain_s=0.2, runtime=RuntimeSettings(eviction="manual_multi_model")
    )
    seeds = _good_requests(source)
    with running_server(source, config) as url:
        host, port = url.removeprefix("http://").split(":")
        _check_good(url, found)
        process, before = psutil.Process(), _held()
        asyncio.run(_rounds(host, int(port), seeds, rng, seconds, url, found))
        _settle(url, process, before, found)
    return found


def _talk(request: GenerationRequest, index: int) -> list[Say]:
    return [Say("word " * 30)]


def _good_requests(source: ScriptedSource) -> list[bytes]:
    """One of every route and method, by every prefix; some with a chunked body."""
    app = build_app(ChatEngine(ModelRuntime(source)), AppConfig())
    found: list[bytes] = []
    for route in app.routes:
        path = re.sub(r"\{[^}]*\}", "m", route.path)
        body = b""
        for prefix in ("", "/v1", "/api"):
            for method in sorted(route.methods or ()):
                if method != "GET":
                    body = msgspec.json.encode(_BODIES.get(path, {}))
                head = f"{method} {prefix}{path} HTTP/1.1\r\nHost: localhost\r\n".encode()
                found.append(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                found.append(
                    head
                    + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
                    if body
                    else head + b"Connection: close\r\n\r\n"
                )
    return [each for each in found if b"/admin/unload" not in each]


async def _rounds(
    host: str,
    port: int,
    seeds: list[bytes],
    rng: random.Random,
    seconds: float,
    url: str,
    found: Findings,
) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not found.faults:
        cases = [_damaged(rng.choice(seeds), rng) for _ in range(_WIDTH)]
        manners = [rng.randrange(6) for _ in cases]
        async with asyncio.timeout(30):
            answers = await asyncio.gather(
                *(
                    _misbehave(host, port, data, manner, random.Random(rng.random()))
                    for data, manner in zip(cases, manners, strict=True)
                )
            )
        for data, answer in zip(cases, answers, strict=True):
            for status in map(int, _STATUS.findall(answer)):
                found.statuses[status] = found.statuses.get(status, 0) + 1
                if status >= 500 and status not in _HONEST_FAILURES:
                    found.faults.append(f"{status} for {data[:600]!r}: {answer[:600]!r}")
        found.requests += len(cases)
        await asyncio.to_thread(_check_good, url, found)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data = data[:at] + rng.choice(_JUNK) + data[at:]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 3:
                data = data[:at] + data[at + rng.randrange(1, 20) :]
            case 4:
                data = data[:at] + data[at // 2 :]
            case _:
                lines = data.split(b"\r\n")
                rng.shuffle(lines)
                data = b"\r\n".join(lines)
        data = data or b"\n"
    return data


async def _misbehave(host: str, port: int, data: bytes, manner: int, rng: random.Random) -> bytes:
    """Send it somehow; what came back until the socket closed or a moment passed."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return b""
    answer = b""
    try:
        if manner == 0:  # by dribs and drabs
            for i in range(0, len(data), max(1, len(data) // 5)):
                writer.write(data[i : i + max(1, len(data) // 5)])
                await writer.drain()
                await asyncio.sleep(0)
        else:
            writer.write(data * (2 if manner == 1 else 1))  # pipelined
            await writer.drain()
        if manner == 2 and writer.can_write_eof():
            writer.write_eof()
        if manner == 3:  # reset instead of a close
            socket = writer.get_extra_info("socket")
            socket.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER
            return answer
        if manner == 4:
            return await asyncio.wait_for(reader.read(rng.randrange(1, 200)), 0.3)
        async with asyncio.timeout(0.3):
            while piece := await reader.read(65536):
                answer += piece
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:
            pass
    return answer


def _check_good(url: str, found: Findings) -> None:
    start = time.monotonic()
    body = {"model": "m", "messages": _MESSAGES}
    response = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    took = time.monotonic() - start
    # A crowd that asks for nothing good may fill the queue, but not for long.
    for _ in range(100):
        if response.status_code != 503:
            break
        time.sleep(0.02)
        start = time.monotonic()
        response = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        took = time.monotonic() - start
    found.slowest_s = max(found.slowest_s, took)
    if response.status_code != 200 or "word" not in response.text:
        found.faults.append(f"a good request got {response.status_code}: {response.text[:300]}")


def _held() -> tuple[int, int]:
    return threading.active_count(), psutil.Process().num_fds()


def _settle(url: str, process: psutil.Process, before: tuple[int, int], found: Findings) -> None:
    """Everything that the misbehaved held is let go of."""
    for _ in range(200):
        health = httpx2.get(f"{url}/health").json()
        threads, handles = _held()
        is_quiet = not health["inflight"] and health["http_inflight"] == 0
        if is_quiet and threads <= before[0] + 4 and handles <= before[1] + 4:
            return
        time.sleep(0.05)
    found.faults.append(f"left over: {health['inflight']}, {_held()} threads and handles")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    found = fuzz(options.seconds, options.seed)
    statuses = ", ".join(f"{status}: {n}" for status, n in sorted(found.statuses.items()))
    sys.stdout.write(
        f"{found.requests} connections; answers {statuses}; a good request took at most "
        f"{1000 * found.slowest_s:.0f} ms\n"
    )
    for fault in found.faults:
        sys.stdout.write(f"FAULT {fault}\n")
    sys.exit(1 if found.faults else 0)


if __name__ == "__main__":
    main()
