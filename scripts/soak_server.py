"""The server that `soak.py` loads: the product's own, which also tells what its process holds.

Prints its address, then, for each line on stdin, one line of JSON: what `Held` names. Ends when
stdin does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import threading
from dataclasses import asdict, dataclass, field

import psutil

from osaurus.runtime.live import LiveSettings
from osaurus.runtime.load import BundleSource
from osaurus.server.serve import HttpServer, ServerConfig
from osaurus.settings.store import SettingsStore


@dataclass(frozen=True, kw_only=True)
class Held:
    """Counts, and names for the report of what is too many."""

    rss_bytes: int
    num_files: int
    threads: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)


def held() -> Held:
    """On the loop's thread. What is garbage already is not held."""
    gc.collect()
    process = psutil.Process()
    return Held(
        rss_bytes=process.memory_info().rss,
        num_files=process.num_fds() if hasattr(process, "num_fds") else 0,
        threads=sorted(thread.name for thread in threading.enumerate()),
        tasks=sorted(str(task.get_coro()) for task in asyncio.all_tasks()),
    )


async def serve() -> None:
    store = SettingsStore()
    store.create()
    source = BundleSource()
    live = LiveSettings(store, source)
    server = HttpServer(source, ServerConfig(port=0, live=live, drain_s=1))
    loop = asyncio.get_running_loop()

    def answer() -> None:
        print(json.dumps(asdict(held())), flush=True)

    def listen() -> None:
        for _ in sys.stdin:
            loop.call_soon_threadsafe(answer)
        server.stop()

    def ready(url: str) -> None:
        print(url, flush=True)
        threading.Thread(target=listen, name="soak-listen", daemon=True).start()

    await server.serve(ready)


if __name__ == "__main__":
    level = os.environ.get("SOAK_LOG", "ERROR")
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(message)s")
    sys.setswitchinterval(1e-4)
    asyncio.run(serve())
