#!/usr/bin/env python3
"""How close the shipped arithmetic is to float32: teacher-forced top-1 agreement and mean KL.

usage: quality.py [MODEL] [--tokens 2000] [--llama-python PYTHON] [--json FILE]

Oracle: transformers on the dequantized weights in float32. Ours: every position as a decode
row over prefill-made KV (a prompt's next token) and over decode-made KV (an answer's).
llama.cpp, when an interpreter with llama_cpp is named, reads the same file and tokens.
Text: benchmarks/public_domain.txt, cut into windows of at most 1,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.engine.batch import build_batch
from osaurus.engine.scheduler import RowSpan
from osaurus.models.base import LayerMemory, Model
from osaurus.models.registry import load_model
from osaurus.topology.base import group_layers

WINDOW_TOKENS = 1000
ROWS = 8

LLAMA_CPP = """
import json, sys, numpy as np, llama_cpp
model, windows, out = sys.argv[1], json.load(open(sys.argv[2])), sys.argv[3]
llm = llama_cpp.Llama(model, n_ctx=2048, logits_all=True, verbose=False, n_batch=int(sys.argv[4]))
rows = []
for window in windows:
    llm.reset(); llm.eval(window)
    rows.append(np.array(llm.scores[:len(window)], dtype=np.float32))
np.save(out, np.concatenate(rows))
"""


class Window:
    """A stretch of text as the part of a request that a runner looks at."""

    def __init__(self, tokens: list[int], groups: int) -> None:
        self.tokens = tokens
        self.tables = [BlockTable(group) for group in range(groups)]
        self.num_tokens = len(tokens)

    def token_at(self, position: int) -> int:
        return self.tokens[position]


@torch.inference_mode()
def ours(model: Model, windows: list[list[int]], *, prefill: bool) -> torch.Tensor:
    """[tokens, V] logits of decode rows; earlier KV made by prefill chunks or decode rows."""
    pool = BlockPool(
        group_layers(model.layers_topology),
        block_tokens=32,
        budget_bytes=1 << 30,
        dtype=model.kv_dtype,
    )
    layers = range(len(model.layers_topology))
    kv = [LayerMemory(group=g, storage=s) for g, s in map(pool.layer_view, layers)]
    parts: list[torch.Tensor] = []
    for tokens in windows:
        window: Any = Window(tokens, len(pool.groups))
        for table in window.tables:
            table.grow(len(tokens), pool)
        if prefill:
            span = RowSpan(window, 0, len(tokens))
            model.forward(build_batch([span], pool, prefill=True, device=model.device), kv)
        rows: dict[int, torch.Tensor] = {}
        # A decode row overwrites its own place only: walking backwards by single rows leaves
        # the KV before each row as prefill made it.
        starts = range(len(tokens) - 1, -1, -1) if prefill else range(0, len(tokens), ROWS)
        for first in starts:
            count = 1 if prefill else min(ROWS, len(tokens) - first)
            batch = build_batch(
                [RowSpan(window, first, count)], pool, prefill=False, device=model.device
            )
            logits = model.forward(replace(batch, logits_rows=torch.arange(count)), kv).logits
            assert logits is not None
            rows.update(zip(range(first, first + count), logits, strict=True))
        parts += [rows[position] for position in range(len(tokens))]
        for table in window.tables:
            table.release(pool)
    return torch.stack(parts)


def oracle(path: Path, windows: list[list[int]]) -> torch.Tensor:
    source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if path.suffix == ".gguf" else path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True, **source
    ).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokens])).logits[0] for tokens in windows])


def llama_cpp(python: str, path: Path, windows: list[list[int]], batch: int) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder, "tokens.json"), Path(folder, "logits.npy")
        tokens.write_text(json.dumps(windows))
        command = [python, "-c", LLAMA_CPP, str(path), str(tokens), str(out), str(batch)]
        subprocess.run(command, check=True)
        return torch.from_numpy(np.load(out))


def compare(name: str, logits: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    p, q = torch.log_softmax(reference.double(), -1), torch.log_softmax(logits.double(), -1)
    kl = (p.exp() * (p - q)).sum(-1)
    agree = (logits.argmax(-1) == reference.argmax(-1)).double().mean()
    result = {
        "path": name,
        "top1": round(float(agree), 4),
        "mean_kl": round(float(kl.mean()), 5),
        "p99_kl": round(float(kl.quantile(0.99)), 4),
    }
    print(
        f"{name:36s} top-1 {result['top1']:.4f}  mean KL {result['mean_kl']:.5f}  "
        f"99th percentile {result['p99_kl']:.4f}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="top-1 agreement and KL against float32")
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--llama-python", help="interpreter that has llama_cpp")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    listing = find_model(arguments.model)
    bundle = open_bundle(listing.path, listing.model_id)
    text = Path(__file__).with_name("public_domain.txt").read_text()
    ids = bundle.load_tokenizer().encode(text)[: arguments.tokens]
    windows = [ids[i : i + WINDOW_TOKENS] for i in range(0, len(ids), WINDOW_TOKENS)]
    print(f"{bundle.model_id}: {len(ids)} tokens", file=sys.stderr)

    reference = oracle(Path(bundle.path), windows)
    model = load_model(bundle, compute_mode="bfloat16")
    results = [
        compare("osaurus, decode over prefill KV", ours(model, windows, prefill=True), reference),
        compare("osaurus, decode over decode KV", ours(model, windows, prefill=False), reference),
    ]
    if arguments.llama_python:
        for batch, name in ((512, "llama.cpp, batches of 512"), (1, "llama.cpp, one by one")):
            logits = llama_cpp(arguments.llama_python, Path(bundle.path), windows, batch)
            results.append(compare(name, logits, reference))
    if arguments.json:
        arguments.json.write_text(json.dumps({"tokens": len(ids), "results": results}, indent=1))


if __name__ == "__main__":
    main()
