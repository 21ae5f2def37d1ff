#!/usr/bin/env python3
"""Bytes of keys and values in memory, exact and compressed, by the pool and by the process.

usage: kv_memory.py [MODEL] [--tokens 8000] [--modes none turbo(3,3) ...] [--json FILE]

A prompt of almost `--tokens` tokens is prefilled and answered until the sequence has that
length; then the pool's own count is read, and what the process's resident memory has grown
by since the model was loaded and had answered something. Each mode runs in its own process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from osaurus.bench.inprocess import StampedOutput
from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.engine.core import BatchEngine
from osaurus.engine.memory import trim_heap
from osaurus.models.registry import load_model
from osaurus.types.cache import CacheConfig, KVMode
from osaurus.types.engine import EngineConfig, GenerationRequest
from osaurus.types.sampling import SamplingParams

TEXT = Path(__file__).parent / "public_domain.txt"
ANSWER_TOKENS = 64


def measure(name: str, mode: str, tokens: int) -> dict[str, float]:
    listing = find_model(name)
    bundle = open_bundle(listing.path, listing.model_id)
    tokenizer = bundle.load_tokenizer()
    engine = BatchEngine(
        load_model(bundle, compute_mode="bfloat16"),
        EngineConfig(cache=CacheConfig(kv_mode=KVMode.parse(mode), use_paged_cache="off")),
        token_bytes=tokenizer.token_bytes,
    )
    ids = tokenizer.encode(TEXT.read_text(), parse_special=False, add_bos=True)
    prompt = (ids * (tokens // len(ids) + 1))[: tokens - ANSWER_TOKENS]

    def ask(name: str, prompt: list[int], count: int) -> StampedOutput:
        output = StampedOutput()
        streams = engine.generate(
            GenerationRequest(
                request_id=name,
                token_ids=prompt,
                params=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
                make_output=lambda: output,
            )
        )
        if name == "warm":
            list(streams[0])
        open_streams.append(streams[0])
        return output

    open_streams: list[object] = []
    ask("warm", prompt[:1024], 8)
    trim_heap()
    engine.pool.give_back_pages()
    before = psutil.Process().memory_info().rss
    # A long answer, so that the request still holds its memory when it is looked at.
    output = ask("long", prompt, ANSWER_TOKENS * 4)
    while len(output.times) < ANSWER_TOKENS:
        time.sleep(0.005)
    used, stats = engine.pool.used_bytes, engine.cache_stats()
    trim_heap()
    grown = psutil.Process().memory_info().rss - before
    at = len(output.times)
    request = engine.scheduler.active[0]
    blocks = request.tables[0].blocks
    exact_bytes = len(blocks) * sum(engine.pool.block_bytes)
    engine.cancel("long")
    engine.shutdown()
    pace = [b - a for a, b in zip(output.times[8:at], output.times[9:at], strict=False)]
    return {
        "tokens": request.num_prompt + at,
        "pool_bytes": used,
        "exact_pool_bytes": exact_bytes,
        "share": used / exact_bytes,
        "coded_blocks": stats.coded_blocks,
        "exact_blocks": sum(block >= 0 for block in blocks),
        "resident_growth_bytes": grown,
        "decode_tokens_per_s": 1 / sorted(pace)[len(pace) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument(
        "--modes", nargs="+", default=["none", "turbo(3,3)", "turbo(4,4)", "affine(4,64)"]
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(json.dumps(measure(args.model, args.one, args.tokens)))
        return
    report = {}
    for mode in args.modes:
        command = [sys.executable, __file__, args.model, "--one", mode, "--tokens"]
        done = subprocess.run(
            [*command, str(args.tokens)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        report[mode] = json.loads(done.stdout)
        sys.stdout.write(f"{mode:14} {report[mode]}\n")
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
