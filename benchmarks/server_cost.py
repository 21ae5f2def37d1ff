#!/usr/bin/env python3
"""CPU that serving adds to a token: osaurus, llama.cpp's server and `transformers serve`.

usage: PYTHONPATH=src python benchmarks/server_cost.py MODEL.gguf [--llama-bin DIR]
       [--transformers-python PYTHON] [--rounds 3] [--tokens 600]

One layer of MODEL, so that computing is cheap, on one thread each (threads that wait by spinning
would count). Each program streams answers of two lengths over HTTP; the slope of its process's
CPU time is what a served token costs. The same without a server (the engine alone, `llama-bench`,
`generate`) is taken off. Rounds alternate; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
from peer_servers import dequantized, free_port

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OSAURUS_NO_UPDATE": "1"}

_ENGINE_ALONE = """
import sys, time
from pathlib import Path
import torch; torch.set_num_threads(1)
from osaurus.bench.inprocess import EngineRunner
from osaurus.bench.workloads import Workload
from osaurus.bundle.bundle import open_bundle
from osaurus.engine.core import BatchEngine
from osaurus.models.registry import load_model
from osaurus.types.engine import EngineConfig
bundle = open_bundle(Path(sys.argv[1]), "small")
engine = BatchEngine(load_model(bundle, compute_mode="bfloat16"), EngineConfig(),
                     token_bytes=bundle.load_tokenizer().token_bytes, identity="small")
runner = EngineRunner("osaurus", engine)
def run(n):
    runner.run_once(Workload(kind="decode", prompt_tokens=16, new_tokens=n),
                    [list(range(100, 116))])
import atexit; atexit.register(engine.shutdown)
"""
_GENERATE = """
import sys, time
from pathlib import Path
import torch; torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
path = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.bfloat16).eval()
@torch.inference_mode()
def run(n):
    ids = torch.arange(100, 116)[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n,
                   do_sample=False, pad_token_id=0)
"""
_SLOPE = """
short, long = int(sys.argv[2]), int(sys.argv[3])
run(8)
a = time.process_time(); run(short); b = time.process_time(); run(long); c = time.process_time()
print("SLOPE", ((c - b) - (b - a)) / (long - short))
"""


def one_layer(source: Path, folder: Path) -> Path:
    """A copy of the GGUF file with its first layer only."""
    import gguf

    reader = gguf.GGUFReader(source)
    arch = str(bytes(reader.fields["general.architecture"].parts[-1]), "utf-8")
    path = folder / "small.gguf"
    writer = gguf.GGUFWriter(path, arch)
    for name, found in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = found.types[0]
        inner = found.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = 1 if name == f"{arch}.block_count" else found.contents()
        writer.add_key_value(name, value, kind, inner)
    for tensor in reader.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if layer is None or int(layer[1]) == 0:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextmanager
def server(command: list[str], port: int, env: dict[str, str]) -> Generator[psutil.Process]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_ONE_THREAD, **env},
    )
    try:
        for _ in range(600):
            try:
                if httpx2.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200:
                    break
            except httpx2.TransportError:
                pass
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def cpu_s(process: psutil.Process) -> float:
    """Of the process and its children."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in family)


def stream(port: int, model: str, tokens: int, extra: dict[str, Any]) -> int:
    """Read one answer to its end; how many tokens it had."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    count = pieces = 0
    with httpx2.stream("POST", url, json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                pieces += bool(chunk.get("choices"))
                count = (chunk.get("usage") or {}).get("completion_tokens", count)
    return count or pieces


def served(
    process: psutil.Process, port: int, model: str, tokens: int, extra: dict[str, Any]
) -> float:
    """CPU seconds of a served token: the slope between a short and a long answer."""
    stream(port, model, 8, extra)
    marks = [(0, cpu_s(process))]
    for length in (tokens // 6, tokens):
        count = stream(port, model, length, extra)
        marks.append((count, cpu_s(process)))
    short, long = marks[1][0], marks[2][0]
    if long - short < tokens // 3:
        raise SystemExit(f"{model}: answers of {short} and {long} tokens give no slope")
    return ((marks[2][1] - marks[1][1]) - (marks[1][1] - marks[0][1])) / (long - short)


def alone(python: str, code: str, path: Path, tokens: int) -> float:
    done = subprocess.run(
        [python, "-c", code + _SLOPE, str(path), str(tokens // 6), str(tokens)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **_ONE_THREAD},
    )
    return float(done.stdout.split("SLOPE")[1])


def llama_alone(folder: Path, path: Path, tokens: int) -> float:
    found: list[float] = []
    for length in (tokens // 6, tokens):
        command = [str(folder / "llama-bench"), "-m", str(path), "-p", "0", "-n", str(length)]
        child = subprocess.Popen(
            [*command, "-r", "1", "-t", "1", "--no-warmup"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, _, usage = os.wait4(child.pid, 0)
        found.append(usage.ru_utime + usage.ru_stime)
    return (found[1] - found[0]) / (tokens - tokens // 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--transformers-python", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=600)
    options = parser.parse_args()
    tokens = options.tokens
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        model_folder = home / "models" / "bench" / "small"
        model_folder.mkdir(parents=True)
        small = one_layer(options.model, model_folder)
        ours = {"OSAURUS_HOME": scratch, "OSAURUS_MODELS_DIR": str(home / "models")}

        def osaurus() -> tuple[float, float]:
            port = free_port()
            command = [sys.executable, "-m", "osaurus", "serve", "--port", str(port)]
            with server([*command, "--no-disk-cache"], port, ours) as process:
                cost = served(process, port, "bench/small", tokens, {"ignore_eos": True})
            return cost, alone(sys.executable, _ENGINE_ALONE, small, tokens)

        def llama() -> tuple[float, float]:
            port = free_port()
            command = [str(options.llama_bin / "llama-server"), "-m", str(small), "-t", "1"]
            with server([*command, "--port", str(port), "-np", "1"], port, {}) as process:
                cost = served(process, port, "small", tokens, {"ignore_eos": True})
            return cost, llama_alone(options.llama_bin, small, tokens)

        folder = None
        python = options.transformers_python
        if python:
            folder = dequantized(python, small, home / "plain")

        def transformers() -> tuple[float, float]:
            port = free_port()
            program = str(Path(python).parent / "transformers")
            command = [program, "serve", str(folder), "--port", str(port), "--device", "cpu"]
            more = {"generation_config": json.dumps({"eos_token_id": None, "do_sample": False})}
            with server([*command, "--dtype", "bfloat16"], port, {}) as process:
                cost = served(process, port, str(folder), tokens, more)
            assert folder is not None
            return cost, alone(python, _GENERATE, folder, tokens)

        programs: dict[str, Callable[[], tuple[float, float]]] = {"osaurus": osaurus}
        if options.llama_bin:
            programs["llama.cpp server"] = llama
        if python:
            programs["transformers serve"] = transformers
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
        for _ in range(options.rounds):
            for name, run in programs.items():
                found[name].append(run())
        shutil.rmtree(home / "models")
    print("CPU s per 1,000 tokens     served   engine alone   added by serving")
    for name, pairs in found.items():
        with_server, without = (1000 * statistics.median(each) for each in zip(*pairs, strict=True))
        added = 1000 * statistics.median([a - b for a, b in pairs])
        print(f"{name:24} {with_server:8.3f} {without:14.3f} {added:18.3f}")


if __name__ == "__main__":
    main()
