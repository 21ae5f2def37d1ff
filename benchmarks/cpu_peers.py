#!/usr/bin/env python3
"""osaurus beside llama.cpp, vLLM's CPU build and transformers, on the same weights, over HTTP.

usage: PYTHONPATH=src python benchmarks/cpu_peers.py [--model FILE.gguf] [--quick] [--rounds N]
       [--peers DIR | --llama-bin DIR --vllm-python PYTHON --transformers-python PYTHON]
       [--install DIR] [--output STEM] [--only WORD ...] [--without PEER ...]
       [--pause-after SECONDS]

All servers are up at once and take turns, workload by workload and round by round; those whose
turn it is not are stopped. One client asks all, with the same texts. vLLM and transformers read
the file's dequantized weights in bfloat16. Writes STEM.json (every value) and STEM.md (a table).
With --pause-after the whole run stops itself (SIGSTOP) between two workloads after so many
seconds, until it is continued: a shared machine can be quieted for each stretch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import peer_loads
from peer_roofline import Speeds, fastest, measure_speeds, model_needs, roof
from peer_servers import (
    Program,
    Server,
    dequantized,
    install,
    installed,
    llama_program,
    osaurus_program,
    transformers_program,
    vllm_program,
)
from peer_table import as_markdown

from osaurus.bench.machine import read_machine, torch_facts
from osaurus.bench.workloads import DidNotRun
from osaurus.bundle.bundle import open_bundle
from osaurus.settings.paths import models_dir

_DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
_MIXED_PROMPT = 2000
_SHORT, _LONG = 64, 512
#: A program that takes longer for one workload is asked for it once.
_LONG_TURN_S = 40
_TORCH_ALONE = "import torch, psutil; print(psutil.Process().memory_info().rss)"


def workloads(is_quick: bool) -> tuple[list[peer_loads.Load], int, int]:
    """With the slots and the context that they need."""
    if is_quick:
        prompts, contexts, counts, new = (128, 512), (64, 1024), (4, 8), 64
    else:
        prompts, contexts, counts, new = (128, 512, 2048), (64, 1024, 4096), (1, 2, 4, 8, 16), 64
    found = [peer_loads.prefill(tokens) for tokens in prompts]
    found += [peer_loads.decode(context, new) for context in contexts]
    found += [peer_loads.streams(count, _SHORT, new) for count in counts]
    found += [
        peer_loads.streams(count, _LONG, new) for count in (counts[-1:] if is_quick else counts)
    ]
    found.append(peer_loads.mixed(_MIXED_PROMPT))
    return found, max(counts), 2560 if is_quick else 4608


class Results:
    """Values by figure and program; a figure that failed once has a reason and no values."""

    def __init__(self) -> None:
        self.units: dict[str, str] = {}
        self.values: dict[str, dict[str, list[float]]] = {}
        self.reasons: dict[str, dict[str, str]] = {}
        self._over: set[tuple[str, str]] = set()

    def add(self, figure: str, unit: str, name: str, value: float) -> None:
        self.units[figure] = unit
        self.values.setdefault(figure, {}).setdefault(name, []).append(value)

    def fail(self, figure: str, unit: str, name: str, reason: str) -> None:
        self.units[figure] = unit
        self.reasons.setdefault(figure, {})[name] = reason

    def stop(self, figures: Iterable[str], name: str) -> None:
        """Ask no more for these: what there is stands."""
        self._over.update((figure, name) for figure in figures)

    def is_over(self, figure: str, name: str) -> bool:
        return name in self.reasons.get(figure, {}) or (figure, name) in self._over

    def as_dict(self) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for figure, unit in self.units.items():
            programs: dict[str, Any] = {}
            for name, values in self.values.get(figure, {}).items():
                programs[name] = {
                    "median": statistics.median(values),
                    "low": min(values),
                    "high": max(values),
                    "values": values,
                }
            for name, reason in self.reasons.get(figure, {}).items():
                programs[name] = {"not_run": reason}
            rows[figure] = {"unit": unit, "programs": programs}
        return rows


class Stretches:
    """Stops this process between two workloads when a stretch of work has lasted long enough."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()

    def pause(self) -> None:
        print("paused: continue with kill -CONT", os.getpid(), file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._began = time.monotonic()

    def pause_if_due(self) -> None:
        if self._seconds and time.monotonic() - self._began > self._seconds:
            self.pause()


def run_rounds(
    servers: list[Server],
    loads: list[peer_loads.Load],
    text: peer_loads.Text,
    results: Results,
    *,
    rounds: int,
    stretches: Stretches,
    before_round: Callable[[], None],
    after_round: Callable[[], None],
) -> None:
    for number in range(rounds):
        before_round()
        for load in loads:
            texts = load.draw(text)
            # Who goes first changes, so that a machine that slows down hits each.
            for server in servers[number % len(servers) :] + servers[: number % len(servers)]:
                stretches.pause_if_due()
                _take_turn(server, load, texts, results)
        after_round()


def _take_turn(server: Server, load: peer_loads.Load, texts: list[str], results: Results) -> None:
    name = server.program.name
    if any(results.is_over(figure, name) for figure in load.units):
        return
    started = time.monotonic()
    server.resume()
    client = server.load()
    try:
        server.settle()
        client.ask("Hello", 4)
        for figure, value in load.run(client, texts).items():
            results.add(figure, load.units[figure], name, value)
    except DidNotRun as error:
        for figure, unit in load.units.items():
            results.fail(figure, unit, name, error.message)
    finally:
        client.close()
        server.pause()
    took = time.monotonic() - started
    if took > _LONG_TURN_S:
        results.stop(load.units, name)
    print(f"{load.name}: {name}, {took:.1f} s", file=sys.stderr, flush=True)


def llama_alone(folder: Path, path: Path, threads: int, results: Results, tokens: int) -> None:
    """llama.cpp's own program, without server and client: prefill and decode at no context."""
    command = [str(folder / "llama-bench"), "-m", str(path), "-t", str(threads), "-r", "1"]
    sizes = ["-p", str(_LONG), "-n", str(tokens), "-o", "json"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False)
    for kind, figure in (
        ("n_prompt", f"engine alone, prefill {_LONG}"),
        ("n_gen", "engine alone, decode"),
    ):
        if done.returncode:
            results.fail(figure, "tok/s", "llama-bench", f"it ended with {done.returncode}")
            continue
        for row in json.loads(done.stdout):
            if row[kind]:
                results.add(figure, "tok/s", "llama-bench", row["avg_ts"])


def programs_of(
    options: argparse.Namespace, home: Path, slots: int, context: int
) -> tuple[list[Program], dict[str, str]]:
    """Those that can be started, and why the others cannot."""
    threads = options.threads
    path = options.model
    found = [osaurus_program(path, home, slots, context)]
    missing: dict[str, str] = {}
    if options.llama_bin:
        found.append(llama_program(options.llama_bin, path, slots, context, threads))
    else:
        missing["llama.cpp"] = "no --llama-bin"
    python = options.transformers_python
    folder = None
    if python:
        try:
            folder = dequantized(str(python), path, options.weights / path.stem)
        except DidNotRun as error:
            missing["transformers"] = missing["vLLM CPU"] = error.message
    else:
        missing["transformers"] = "no --transformers-python"
        missing["vLLM CPU"] = "no --transformers-python to dequantize its weights"
    if folder and options.vllm_python:
        found.append(vllm_program(str(options.vllm_python), folder, slots, context, threads))
    elif folder:
        missing["vLLM CPU"] = "no --vllm-python"
    if folder:
        found.append(transformers_program(str(python), folder))
    return found, missing


def start(
    programs: list[Program], servers: list[Server], logs: Path, threads: int, is_chat: bool
) -> dict[str, str]:
    """Add the servers that run to `servers`; why the others do not."""
    missing: dict[str, str] = {}
    for program in programs:
        print(f"starting {program.name}", file=sys.stderr, flush=True)
        try:
            server = Server(program, logs, threads=threads, is_chat=is_chat)
        except (DidNotRun, OSError) as error:
            missing[program.name] = str(error)
            continue
        servers.append(server)
        server.pause()
    return missing


def add_memory(servers: list[Server], results: Results) -> None:
    """Resident at the end; osaurus's growth over a process that only imported torch."""
    done = subprocess.run([sys.executable, "-c", _TORCH_ALONE], capture_output=True, check=True)
    torch_bytes = int(done.stdout)
    for server in servers:
        name = server.program.name
        results.add("resident at first answer", "MB", name, server.first_rss_bytes / 1e6)
        results.add("resident after the run", "MB", name, server.rss_bytes() / 1e6)
        results.add("start to first answer", "s", name, server.start_s)
    first = results.values["resident at first answer"]["osaurus"][0]
    last = results.values["resident after the run"]["osaurus"][0]
    results.add("growth over torch at first answer", "MB", "osaurus", first - torch_bytes / 1e6)
    results.add("growth over torch after the run", "MB", "osaurus", last - torch_bytes / 1e6)


def write(
    options: argparse.Namespace,
    results: Results,
    programs: list[Program],
    missing: dict[str, str],
    speeds: Speeds,
    sizes: tuple[int, int],
) -> None:
    needs = model_needs(options.model)
    rows = results.as_dict()
    for figure, row in rows.items():
        row["roof"] = {
            weights: roof(figure, row["unit"], needs, speeds, weights)
            for weights in ("file", "bfloat16")
        }
    report = {
        "schema_version": 1,
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "model": options.model.name,
        "machine": {**read_machine().as_dict(), **torch_facts()},
        "speeds": asdict(speeds),
        "threads": options.threads,
        "slots": sizes[0],
        "context": sizes[1],
        "programs": {
            each.name: {"version": each.version, "weights": each.weights, "command": each.command}
            for each in programs
        },
        "not_started": missing,
        "rows": rows,
    }
    options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(as_markdown(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=models_dir().path / _DEFAULT_MODEL)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, 2 rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--install", type=Path, help="make the peers' environments there first")
    parser.add_argument("--peers", type=Path, help="what --install made")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--transformers-python", type=Path)
    parser.add_argument("--weights", type=Path, help="keep dequantized weights there")
    parser.add_argument("--output", type=Path, default=Path("cpu_peers"))
    parser.add_argument("--only", nargs="+", help="workloads whose name holds one of these words")
    parser.add_argument("--without", nargs="+", default=[], help="peers to leave out, by name")
    parser.add_argument("--pause-after", type=float, default=0.0)
    options = parser.parse_args()
    if not options.model.is_file():
        parser.error(f"--model: {options.model} is not a file; osaurus pull default fetches one")
    if options.install:
        install(options.install)
    peers = options.peers or options.install
    if peers:
        options.llama_bin = options.llama_bin or installed(peers, "llama")
        options.vllm_python = options.vllm_python or installed(peers, "vllm")
        options.transformers_python = options.transformers_python or installed(
            peers, "transformers"
        )
    return options


def main() -> None:
    options = parse()
    # The servers are stopped also when this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    loads, slots, context = workloads(options.quick)
    if options.only:
        loads = [load for load in loads if any(word in load.name for word in options.only)]
    rounds = options.rounds or (2 if options.quick else 5)
    results = Results()
    scratch = Path(tempfile.mkdtemp(prefix="cpu-peers-"))
    options.weights = options.weights or scratch / "weights"
    servers: list[Server] = []
    try:
        bundle = open_bundle(options.model, "peer")
        tokenizer = bundle.load_tokenizer()
        programs, missing = programs_of(options, scratch, slots, context)
        missing |= dict.fromkeys(options.without, "left out")
        programs = [program for program in programs if program.name not in missing]
        is_chat = bundle.chat_template is not None
        missing |= start(programs, servers, scratch, options.threads, is_chat)
        if "osaurus" in missing:
            raise SystemExit(f"osaurus did not start: {missing['osaurus']}")
        servers[0].resume()
        overhead = servers[0].load().ask("Hello", 2).prompt_tokens - 1
        servers[0].pause()
        text = peer_loads.Text(
            encode=lambda words: len(tokenizer.encode(words)),
            overhead_tokens=overhead,
            random=Random(time.time_ns()),
        )
        stretches = Stretches(options.pause_after)
        if options.pause_after:
            stretches.pause()
        speeds: list[Speeds] = []

        def before_round() -> None:
            speeds.append(measure_speeds(options.threads))

        def after_round() -> None:
            if options.llama_bin:
                llama_alone(options.llama_bin, options.model, options.threads, results, 64)
            write(options, results, programs, missing, fastest(speeds), (slots, context))

        run_rounds(
            servers,
            loads,
            text,
            results,
            rounds=rounds,
            stretches=stretches,
            before_round=before_round,
            after_round=after_round,
        )
        add_memory(servers, results)
        write(options, results, programs, missing, fastest(speeds), (slots, context))
        print(options.output.with_suffix(".md").read_text())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for server in servers:
            server.stop()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
