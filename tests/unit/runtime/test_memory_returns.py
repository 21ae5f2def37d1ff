"""Claim: unloading a model gives its memory back to the system, however often it is loaded.

The real default model in a process of its own. It is loaded once before anything is measured: the
libraries that a first load maps stay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_LOADS = 20

_PROGRAM = """
import asyncio, json, os, sys, threading
import psutil
from osaurus.parsing.output import OutputPipeline
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.runtime.pool import ModelRuntime
from osaurus.types.engine import EngineConfig, GenerationRequest
from osaurus.types.sampling import SamplingParams

def measure():
    device = 0
    if sys.argv[2] == "cuda":
        import torch
        device = torch.cuda.memory_reserved()
    return {
        "device": device,
        "rss": psutil.Process().memory_info().rss,
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
    }

async def use(runtime):
    with await runtime.acquire("default") as model:
        request = GenerationRequest(
            request_id="r",
            token_ids=range(100, 900),
            params=SamplingParams(max_tokens=8),
            make_output=lambda: OutputPipeline(model.tokenizer),
        )
        (stream,) = model.engine.generate(request)
        async for _ in stream:
            pass
        await stream.drained()
        return measure()

async def main():
    engine = EngineConfig(kv_budget_bytes=512 << 20)
    options = LoadOptions(device=sys.argv[2], engine=engine, disk_cache=False)
    runtime = ModelRuntime(BundleSource(options))
    await use(runtime)
    await runtime.unload("default")
    for _ in range(int(sys.argv[1])):
        row = {"before": measure()}
        row["loaded"] = await use(runtime)
        await runtime.unload("default")
        row["after"] = measure()
        print(json.dumps(row), flush=True)
    await runtime.shut_down()

asyncio.run(main())
"""


def _loads(device: str) -> list[dict[str, dict[str, int]]]:
    source = Path(__file__).parents[3] / "src"
    # Threads that spin on cores that others want would make this last for minutes.
    spin = os.environ.get("GOMP_SPINCOUNT", "1000")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(NUM_LOADS), device],
        env={**os.environ, "PYTHONPATH": str(source), "GOMP_SPINCOUNT": spin},
        capture_output=True,
        text=True,
        check=True,
        timeout=800,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows(default_bundle: object) -> list[dict[str, dict[str, int]]]:
    return _loads("cpu")


def test_every_unload_gives_back_what_the_load_took(rows: list[dict[str, dict[str, int]]]) -> None:
    assert len(rows) == NUM_LOADS
    for row in rows:
        before, after = row["before"]["rss"], row["after"]["rss"]
        assert abs(after - before) <= max(0.05 * before, 50 << 20), rows
        assert row["loaded"]["rss"] > before + (80 << 20)  # there was something to give back


def test_nothing_adds_up_over_the_loads(rows: list[dict[str, dict[str, int]]]) -> None:
    first, last = rows[0]["before"], rows[-1]["after"]
    assert last["rss"] - first["rss"] <= 50 << 20, rows
    assert last["fds"] <= first["fds"]
    assert last["threads"] <= first["threads"] + 1  # the one that gave the memory back may end yet


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_memory_of_a_device_comes_back_too(default_bundle: object) -> None:
    rows = _loads("cuda")
    assert len(rows) == NUM_LOADS
    for row in rows:
        before, after = row["before"]["device"], row["after"]["device"]
        assert after - before <= max(0.05 * before, 50 << 20), rows
        assert row["loaded"]["device"] > before + (80 << 20)
    assert rows[-1]["after"]["device"] - rows[0]["before"]["device"] <= 50 << 20
