#!/usr/bin/env python3
"""What compressed KV costs in quality: perplexity, top-1 agreement and KL against exact KV.

usage: kv_quality.py [MODEL] [--tokens 2100] [--prompt 200] [--json FILE]

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
from osaurus.engine.scheduler import RowSpan
from osaurus.kernels.coded_attention import CodedPlan, CodedStorage, Span, coded_id, plan_coded
from osaurus.models.base import ForwardBatch, LayerMemory, Model
from osaurus.models.registry import load_model
from osaurus.topology.base import AttentionTopology, group_layers
from osaurus.topology.codecs.affine import AffineCodec
from osaurus.topology.codecs.base import KVCodec, codable_blocks
from osaurus.topology.codecs.turboquant import KeyEstimator, TurboQuantCodec

BLOCK_TOKENS = 32
ROWS = 8

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
        self.tables = [BlockTable(0)]
        self.num_tokens = len(tokens)

    def token_at(self, position: int) -> int:
        return self.tokens[position]


class Session:
    """A model over one pool whose blocks are coded by one codec, or by none."""

    def __init__(self, model: Model, codec_for: CodecFor | None) -> None:
        groups = group_layers(model.layers_topology)
        if len(groups) != 1 or groups[0].topology.window is not None:
            sys.exit("kv_quality: the model must have full attention in every layer")
        topology = groups[0].topology
        self._model = model
        self._codec = None if codec_for is None else codec_for(topology)
        self.pool = BlockPool(
            groups, block_tokens=BLOCK_TOKENS, budget_bytes=1 << 30, dtype=model.kv_dtype
        )
        nbytes = 1 if self._codec is None else self._codec.block_bytes
        shape = (len(groups[0].layers), 1000, topology.num_kv_heads, nbytes)
        self._coded = torch.zeros(shape, dtype=torch.uint8)
        self._num_coded = 0
        self._memory = [
            LayerMemory(
                group=0,
                storage=self.pool.layer_view(layer)[1],
                coded=None
                if self._codec is None
                else CodedStorage(self._coded[layer], self._codec),
            )
            for layer in range(len(model.layers_topology))
        ]
        exact_bytes = self.pool.block_bytes[0]
        coded_bytes = nbytes * topology.num_kv_heads * len(groups[0].layers)
        self.token_bytes = (coded_bytes if self._codec else exact_bytes) // BLOCK_TOKENS

    @torch.inference_mode()
    def run(self, text: Any, prompt: int) -> tuple[torch.Tensor, list[float]]:
        """[tokens - prompt, V] logits of the rows after the prompt, and seconds of each step."""
        text.tables[0].grow(len(text.tokens), self.pool)
        span = RowSpan(text, 0, prompt)
        batch = build_batch([span], self.pool, prefill=True, device=self._model.device)
        self._model.forward(batch, self._memory)
        parts: list[torch.Tensor] = []
        seconds: list[float] = []
        for first in range(prompt, len(text.tokens), ROWS):
            self._code(text.tables[0], first)
            count = min(ROWS, len(text.tokens) - first)
            start = time.perf_counter()
            logits = self._model.forward(self._batch(text, first, count), self._memory).logits
            seconds.append(time.perf_counter() - start)
            assert logits is not None
            parts.append(logits)
        return torch.cat(parts), seconds

    def _batch(self, text: Any, first: int, count: int) -> ForwardBatch:
        span = RowSpan(text, first, count)
        batch = build_batch([span], self.pool, prefill=False, device=self._model.device)
        blocks = text.tables[0].blocks
        rows = Span(start=0, length=count, first_position=first, blocks=blocks, first_block=0)
        plan = plan_coded([rows], BLOCK_TOKENS, self._model.device)
        group = batch.groups[0]
        if isinstance(plan, CodedPlan):
            group = replace(group, decode=None, coded=plan)
        return replace(batch, groups=(group,), logits_rows=torch.arange(count))

    def _code(self, table: BlockTable, num_tokens: int) -> None:
        if self._codec is None:
            return
        for index in codable_blocks(num_tokens, BLOCK_TOKENS):
            block = table.blocks[index]
            if block < 0:
                continue
            exact = self.pool.storage[0][:, block]
            if not self._codec.fits(exact).all():
                print(f"block {index} does not fit and stays exact", file=sys.stderr)
                continue
            self._coded[:, self._num_coded] = self._codec.encode(exact)
            exact.zero_()
            table.blocks[index] = coded_id(self._num_coded)
            self._num_coded += 1


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
    for name, codec_for in CODECS.items():
        score = Score()
        token_bytes = 0
        for index, tokens in enumerate(texts):
            session = Session(model, codec_for)
            token_bytes = session.token_bytes
            logits, seconds = session.run(Text(tokens), arguments.prompt)
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
