#!/usr/bin/env python3
"""transformers in eager mode as a peer of `osaurus bench`, in its own process.

usage: transformers_peer.py MODEL [--dtype bfloat16]      MODEL: a folder or a .gguf file

Speaks lines of JSON: first its facts, then one sample for each workload read from stdin, until
stdin ends. A GGUF file is dequantized by transformers itself. Imports nothing of osaurus, so
that what is compared cannot share a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria


class Stamp(StoppingCriteria):
    """Notes when each token was chosen; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def load(model: Path, dtype: str) -> Any:
    if model.suffix == ".gguf":
        source, options = model.parent, {"gguf_file": model.name}
    else:
        source, options = model, {}
    loaded = AutoModelForCausalLM.from_pretrained(
        str(source), dtype=getattr(torch, dtype), local_files_only=True, **options
    )
    return loaded.eval()


@torch.inference_mode()
def run(model: Any, work: dict[str, Any]) -> dict[str, float]:
    """One workload: prompts of equal length as one batch."""
    ids = torch.tensor(work["prompts"])
    stamp = Stamp()
    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=work["new_tokens"],
        min_new_tokens=work["new_tokens"],
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[stamp],
    )
    ttft = stamp.times[0] - started
    if work["kind"] == "prefill":
        rate = ids.shape[1] / ttft
    else:
        rate = ids.shape[0] * (len(stamp.times) - 1) / (stamp.times[-1] - stamp.times[0])
    return {"ttft_s": ttft, "tokens_per_s": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers as a peer of osaurus bench")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()

    # Libraries print; the protocol keeps the real stdout for itself.
    replies: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    sys.stdout = sys.stderr
    transformers.logging.set_verbosity_error()

    started = time.perf_counter()
    model = load(arguments.model, arguments.dtype)
    facts = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "load_s": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(facts), file=replies)
    for line in sys.stdin:
        reply: dict[str, Any] = run(model, json.loads(line))
        reply["rss_bytes"] = psutil.Process().memory_info().rss
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
