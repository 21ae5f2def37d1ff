#!/usr/bin/env python3
"""What a shared prefix costs: cold, from memory, and from disk in a fresh process.

usage: prefix_cache.py [MODEL] [--prefix 4096] [--tail 32] [--repeats 3] [--json FILE]

Each prompt is the same prefix and a tail of its own; the time is from submission to the first
token of the answer, through the engine. "decode beside the writer" is the rate of a stream
while another request's blocks are written, as a share of the rate without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from osaurus.bench.inprocess import StampedOutput
from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.engine.core import BatchEngine
from osaurus.models.registry import load_model
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig, GenerationRequest
from osaurus.types.events import Info
from osaurus.types.sampling import SamplingParams

TEXT = Path(__file__).parent / "public_domain.txt"


class Bench:
    """One engine over the model, with or without a directory for its disk tier."""

    def __init__(self, name: str, disk_dir: Path | None) -> None:
        listing = find_model(name)
        bundle = open_bundle(listing.path, listing.model_id)
        self.tokenizer = bundle.load_tokenizer()
        self.engine = BatchEngine(
            load_model(bundle, compute_mode="bfloat16"),
            EngineConfig(cache=CacheConfig(disk_dir=disk_dir)),
            token_bytes=self.tokenizer.token_bytes,
            identity=f"{listing.model_id}@bench",
        )
        self._count = 0

    def prefix(self, length: int) -> list[int]:
        ids = self.tokenizer.encode(TEXT.read_text(), parse_special=False, add_bos=True)
        return (ids * (length // len(ids) + 1))[:length]

    def tail(self, length: int) -> list[int]:
        self._count += 1
        return [1000 + (self._count * 7919 + i) % 20000 for i in range(length)]

    def start(self, prompt: list[int], new_tokens: int) -> Any:
        self._count += 1
        (stream,) = self.engine.generate(
            GenerationRequest(
                request_id=f"r{self._count}",
                token_ids=prompt,
                params=SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True),
                make_output=StampedOutput,
            )
        )
        return stream

    def run(self, prompt: list[int], new_tokens: int = 1) -> tuple[float, Info]:
        started = time.perf_counter()
        events = list(self.start(prompt, new_tokens))
        took, info = time.perf_counter() - started, events[-1]
        if not isinstance(info, Info) or info.error:
            raise SystemExit(f"a request failed: {info}")
        return took, info

    def settle(self) -> None:
        """Wait until everything that was queued lies on disk."""
        while self.engine.cache.has_work:
            time.sleep(0.01)
        if self.engine.cache.disk is not None:
            self.engine.cache.disk.flush()


def warm_phase(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    bench.run(bench.tail(64), 8)
    prefix, cold, memory = bench.prefix(args.prefix), [], []
    for _ in range(args.repeats):
        bench.engine.clear_cache()
        bench.settle()
        took, info = bench.run(prefix + bench.tail(args.tail))
        assert info.cached_prompt_tokens == 0, "the first request must be cold"
        cold.append(took)
        bench.settle()
        took, info = bench.run(prefix + bench.tail(args.tail))
        assert info.cache_detail == "paged", info
        memory.append(took)
    bench.settle()
    return {"cold_s": cold, "memory_s": memory}


def disk_phase(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    bench.run(bench.tail(64), 8)
    took, info = bench.run(bench.prefix(args.prefix) + bench.tail(args.tail))
    if info.cache_detail != "disk":
        raise SystemExit(f"no disk hit: {info}, {bench.engine.cache_stats()}")
    return {"disk_s": took, "cached_tokens": info.cached_prompt_tokens}


def writer_phase(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Decode rates of one stream, with and without a 4,096-token prefix being written."""
    bench.run(bench.tail(64), 8)
    prefix, shares = bench.prefix(args.prefix), []
    disk = bench.engine.cache.disk
    for _ in range(args.repeats):
        rates = []
        for store in (False, True):
            bench.engine.clear_cache()
            bench.settle()
            if not store:
                bench.engine.cache.disk = None
            bench.run(prefix + bench.tail(args.tail))
            _, info = bench.run(bench.tail(32), 128)
            rates.append(info.tokens_per_second)
            bench.engine.cache.disk = disk
            bench.settle()
        shares.append(rates[1] / rates[0])
    return {"decode_share": shares}


PHASES = {"warm": warm_phase, "disk": disk_phase, "writer": writer_phase}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--tail", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        bench = Bench(args.model, args.directory)
        report = PHASES[args.phase](bench, args)
        bench.engine.shutdown()
        sys.stdout.write(json.dumps(report))
        return
    with tempfile.TemporaryDirectory() as folder:
        report = phase(args, "warm", folder)
        size = sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())
        runs = [phase(args, "disk", folder) for _ in range(args.repeats)]
        report |= {
            "disk_s": [run["disk_s"] for run in runs],
            "cached_tokens": runs[0]["cached_tokens"],
            "disk_bytes": size,
        }
        report |= phase(args, "writer", folder)
    cold = statistics.median(report["cold_s"])
    for name in ("memory_s", "disk_s"):
        report[f"{name[:-2]}_share_of_cold"] = statistics.median(report[name]) / cold
    report["decode_share_median"] = statistics.median(report["decode_share"])
    for name, value in report.items():
        sys.stdout.write(f"{name:22} {value}\n")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))


def phase(args: argparse.Namespace, name: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, args.model, "--phase", name, "--directory", folder]
    for option in ("prefix", "tail", "repeats"):
        command += [f"--{option}", str(getattr(args, option))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
