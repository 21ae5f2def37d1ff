#!/usr/bin/env python3
"""What compressed KV costs in quality: perplexity, top-1 agreement and KL against exact KV.

usage: kv_quality.py [MODEL] [--tokens 2100] [--prompt 200] [--codecs NAME ...] [--json FILE]

Teacher-forced as an answer is generated: the prompt is prefilled, then every token is a decode
row; a block is coded as soon as it may be, after which its exact values are gone. Sinks, tail
and arithmetic are the same for all; only the codec differs. Counted are the decode rows.
Text: benchmarks/public_domain.txt, once in order and once with its halves exchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.engine.batch import build_batch
from osaurus.engine.runner import Runner
from osaurus.engine.scheduler import RowSpan
from osaurus.models.base import Model
from osaurus.models.registry import load_model
from osaurus.topology.base import AttentionTopology, group_layers
from osaurus.topology.codecs.affine import AffineCodec
from osaurus.topology.codecs.base import KVCodec, codable_blocks
from osaurus.topology.codecs.turboquant import KeyEstimator, TurboQuantCodec

BLOCK_TOKENS = 32
ROWS = 8
PREFILL_TOKENS = 512

CodecFor = Callable[[AttentionTopology], KVCodec]


def turbo(bits: int, estimator: KeyEstimator) -> CodecFor:
    return lambda t: TurboQuantCodec(
        bits,
        bits,
        k_dim=t.k_dim,
        v_dim=t.v_dim,
        block_tokens=BLOCK_TOKENS,
        key_estimator=estimator,
    )


def affine(bits: int) -> CodecFor:
    return lambda t: AffineCodec(bits, 64, k_dim=t.k_dim, v_dim=t.v_dim, block_tokens=BLOCK_TOKENS)


CODECS: dict[str, CodecFor | None] = {
    "exact": None,
    "turbo 3/3 qjl": turbo(3, "qjl"),
    "turbo 3/3 mse": turbo(3, "mse"),
    "turbo 4/4 qjl": turbo(4, "qjl"),
    "turbo 4/4 mse": turbo(4, "mse"),
    "affine 4/64": affine(4),
    "affine 8/64": affine(8),
}


class Text:
    """A stretch of text as the part of a request that a runner looks at."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.tables: list[BlockTable] = []
        self.num_tokens = len(tokens)

    def token_at(self, position: int) -> int:
        return self.tokens[position]


class Rows:
    """A model over one pool; layers with full attention have coded blocks, or none have."""

    def __init__(self, model: Model, codec_for: CodecFor | None) -> None:
        groups = group_layers(model.layers_topology)
        codecs = [
            codec_for(group.topology) if codec_for and group.topology.window is None else None
            for group in groups
        ]
        self._model = model
        self.pool = BlockPool(
            groups,
            block_tokens=BLOCK_TOKENS,
            budget_bytes=2 << 30,
            dtype=model.kv_dtype,
            codecs=codecs,
        )
        self._runner = Runner(model, self.pool)
        self.token_bytes = 0
        for index, size in enumerate(self.pool.block_bytes):
            coded = self.pool.coded[index]
            self.token_bytes += (size if coded is None else coded.block_bytes) // BLOCK_TOKENS

    @torch.inference_mode()
    def run(self, text: Any, prompt: int) -> tuple[torch.Tensor, list[float]]:
        """[tokens - prompt, V] logits of the rows after the prompt, and seconds of each step."""
        text.tables = [BlockTable(group) for group in range(len(self.pool.groups))]
        for table in text.tables:
            table.grow(len(text.tokens), self.pool)
        for first in range(0, prompt, PREFILL_TOKENS):
            count = min(PREFILL_TOKENS, prompt - first)
            self._runner.prefill(RowSpan(text, first, count))
        parts: list[torch.Tensor] = []
        seconds: list[float] = []
        for first in range(prompt, len(text.tokens), ROWS):
            self._code(text.tables, first)
            count = min(ROWS, len(text.tokens) - first)
            batch = build_batch(
                [RowSpan(text, first, count)], self.pool, prefill=False, device=self._model.device
            )
            start = time.perf_counter()
            logits = self._model.forward(
                replace(batch, logits_rows=torch.arange(count)), self._runner.memory
            ).logits
            seconds.append(time.perf_counter() - start)
            assert logits is not None
            parts.append(logits)
        return torch.cat(parts), seconds

    def _code(self, tables: list[BlockTable], num_tokens: int) -> None:
        for group, table in enumerate(tables):
            if self.pool.coded[group] is None:
                continue
            for index in codable_blocks(num_tokens, BLOCK_TOKENS):
                block = table.blocks[index]
                if block < 0:
                    continue
                coded = self.pool.code(group, block)
                if coded is None:
                    print(f"block {index} does not fit and stays exact", file=sys.stderr)
                    continue
                table.blocks[index] = coded
                self.pool.release(group, block)


class Score:
    """Sums over rows of what one codec's logits say beside the exact ones."""

    def __init__(self) -> None:
        self.kl: list[torch.Tensor] = []
        self.agree: list[torch.Tensor] = []
        self.loss: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def add(self, logits: torch.Tensor, exact: torch.Tensor, following: list[int]) -> None:
        p, q = torch.log_softmax(exact.double(), -1), torch.log_softmax(logits.double(), -1)
        self.kl.append((p.exp() * (p - q)).sum(-1))
        self.agree.append((logits.argmax(-1) == exact.argmax(-1)).double())
        targets = torch.tensor(following).unsqueeze(1)
        self.loss.append(-q[: len(following)].gather(1, targets).squeeze(1))

    def result(self, name: str, token_bytes: int) -> dict[str, Any]:
        kl, loss = torch.cat(self.kl), torch.cat(self.loss)
        result = {
            "codec": name,
            "token_bytes": token_bytes,
            "perplexity": round(float(loss.mean().exp()), 3),
            "top1": round(float(torch.cat(self.agree).mean()), 4),
            "mean_kl": round(float(kl.mean()), 5),
            "p99_kl": round(float(kl.quantile(0.99)), 4),
            "step_ms": round(1e3 * sorted(self.seconds)[len(self.seconds) // 2], 1),
        }
        print(
            f"{name:14s} {token_bytes:6d} B/token  perplexity {result['perplexity']:7.3f}  "
            f"top-1 {result['top1']:.4f}  mean KL {result['mean_kl']:.5f}  "
            f"99th percentile {result['p99_kl']:.4f}  {result['step_ms']} ms a step of {ROWS} rows",
            flush=True,
        )
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description="compressed against exact KV")
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--tokens", type=int, default=2100)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    listing = find_model(arguments.model)
    bundle = open_bundle(listing.path, listing.model_id)
    written = Path(__file__).with_name("public_domain.txt").read_text()
    ids = bundle.load_tokenizer().encode(written)[: arguments.tokens]
    half = len(ids) // 2
    texts = [ids, ids[half:] + ids[:half]]
    print(f"{bundle.model_id}: 2 x {len(ids)} tokens", file=sys.stderr)

    model = load_model(bundle, compute_mode="bfloat16")
    exact: list[torch.Tensor] = []
    results: list[dict[str, Any]] = []
    for name in ["exact", *(n for n in arguments.codecs if n != "exact")]:
        codec_for = CODECS[name]
        score = Score()
        token_bytes = 0
        for index, tokens in enumerate(texts):
            rows = Rows(model, codec_for)
            token_bytes = rows.token_bytes
            logits, seconds = rows.run(Text(tokens), arguments.prompt)
            if codec_for is None:
                exact.append(logits)
            score.add(logits, exact[index], tokens[arguments.prompt + 1 :])
            score.seconds += seconds
        results.append(score.result(name, token_bytes))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"tokens": 2 * len(ids), "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
