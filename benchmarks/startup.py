#!/usr/bin/env python3
"""Time from a cold process to the first token of `osaurus run MODEL "hi"`, and where it goes.

usage: PYTHONPATH=src python benchmarks/startup.py [--model NAME_OR_PATH] [--runs N]
       [--llama-bin DIR --llama-model FILE.gguf] [--json FILE]

Each run is a process of its own that finds the model's file in the system's page cache (one run
before is not counted). The first token is there when the first byte of the answer has come
through the pipe. Stages are taken in further runs, in which a stamp is set around each. With
--llama-bin llama.cpp's server is timed from its start to the end of an answer of four tokens,
beside `osaurus serve`. Other programs only ever add to such times: the fewest seconds of all
runs are the figure to compare.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NEVER_RUNNING = "1"  # a port that no server of the user's own answers on
_QUESTION = ["hi", "--max-tokens", "4", "--temperature", "0"]


def first_token(command: list[str]) -> float:
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OSAURUS_SERVER__PORT": _NEVER_RUNNING},
    )
    assert process.stdout is not None
    came = os.read(process.stdout.fileno(), 1)
    took = time.perf_counter() - started
    _, said = process.communicate()
    if not came or process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {said.decode()}")
    return took


def stages(model: str) -> dict[str, float]:
    """Of one further run: seconds by stage, in the order in which they end."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        first_token([sys.executable, __file__, "--trace", file.name, model])
        return json.load(file)


def server_start(programs: Iterator[Any], logs: Path) -> dict[str, float]:
    from peer_servers import Server

    found: dict[str, float] = {}
    for program in programs:
        server = Server(program, logs, threads=os.cpu_count() or 1, is_chat=True)
        server.stop()
        found[program.name] = server.start_s
    return found


def trace(path: str, model: str) -> int:
    """In a process of its own: what `osaurus run` does, with a stamp around each stage."""
    began = time.perf_counter()
    took: dict[str, float] = {}

    def timed(place: Any, name: str, stage: str, then: Callable[[], object] = bool) -> None:
        plain = getattr(place, name)

        @functools.wraps(plain)
        def stamped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                took[stage] = took.get(stage, 0.0) + time.perf_counter() - start
                then()

        setattr(place, name, stamped)

    def engine_is_imported() -> None:
        import osaurus.models.registry as registry

        timed(registry, "load_model", "weights")

    import osaurus.cli.run
    from osaurus.cli.app import run_command_line

    took["command line imported"] = time.perf_counter() - began
    now = time.perf_counter()
    import osaurus.runtime.load as load
    import osaurus.server.serve  # noqa: F401
    from osaurus.bundle import renderer
    from osaurus.bundle.bundle import Bundle

    took["server imported"] = time.perf_counter() - now
    timed(load, "import_engine", "torch and engine imported", engine_is_imported)
    timed(Bundle, "load_tokenizer", "tokenizer")
    timed(load.LoadedWeights, "make_engine", "engine built")
    timed(renderer.RenderPool, "run", "template rendered")
    plain = sys.stdout.write

    def write(text: str) -> int:
        if text.strip() and "whole" not in took:
            took["whole"] = time.perf_counter() - began
        return plain(text)

    sys.stdout.write = write
    code = run_command_line(["run", model, *_QUESTION])
    Path(path).write_text(json.dumps(took))
    return code


def _row(label: str, values: list[float]) -> str:
    return f"| {label} | {min(values):.2f} | {statistics.median(values):.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--llama-model", type=Path, help="the same file, for both servers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    parser.add_argument("traced", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        return trace(options.trace, options.traced)
    if options.llama_bin and not (options.llama_model and options.llama_model.is_file()):
        parser.error("--llama-model: names no file; --llama-bin needs the model's GGUF there")

    command = [sys.executable, "-m", "osaurus", "run", options.model, *_QUESTION]
    first_token(command)
    rows: dict[str, list[float]] = {"first token": []}
    for _ in range(options.runs):
        rows["first token"].append(first_token(command))
        for stage, seconds in stages(options.model).items():
            rows.setdefault(f"stage: {stage}", []).append(seconds)
    if options.llama_bin:
        from peer_servers import llama_program, osaurus_program

        with tempfile.TemporaryDirectory() as scratch:
            home, count = Path(scratch), os.cpu_count() or 1
            for _ in range(options.runs):
                path = options.llama_model
                pair = iter(
                    (
                        osaurus_program(path, home, 1, 2048),
                        llama_program(options.llama_bin, path, 1, 2048, count),
                    )
                )
                for name, seconds in server_start(pair, home).items():
                    rows.setdefault(f"server, first answer: {name}", []).append(seconds)
    print(f"seconds, {options.runs} runs\n\n| figure | fewest | median |\n| --- | --- | --- |")
    for label, values in rows.items():
        print(_row(label, values))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
