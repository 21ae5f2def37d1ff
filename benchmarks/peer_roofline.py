"""What the machine could do at most: its read bandwidth and its bfloat16 products, by what a
figure needs of them.

Decoding reads every weight once a step, and each stream's keys and values; a prompt multiplies
every matrix once a token. Nothing else is counted, so the roof is never reached.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from osaurus.bundle.gguf_config import config_from_gguf
from osaurus.bundle.gguf_reader import read_gguf

_READ_BYTES = 1 << 30
_GEMM = (512, 2048, 2048)
_REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    read_bytes_per_s: float
    bf16_flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Of a model: bytes of its weights as stored, matrix elements of the layers and of the
    head, and of each layer its window (0: none), key-value width and query width."""

    file_bytes: int
    body_elements: int
    head_elements: int
    windows: tuple[int, ...]
    kv_width: int
    query_width: int

    def weight_bytes(self, weights: str) -> int:
        return self.file_bytes if weights == "file" else 2 * self._elements

    def kv_bytes(self, tokens: float) -> float:
        return sum(4 * self.kv_width * self._seen(window, tokens) for window in self.windows)

    def prefill_flop(self, tokens: int) -> float:
        """One prompt: each token through the layers, the last through the head, and causal
        attention (scores and sums over half of what lies before, or the window)."""
        attention = sum(
            4 * self.query_width * tokens * min(tokens / 2, window or tokens)
            for window in self.windows
        )
        return 2 * self.body_elements * tokens + 2 * self.head_elements + attention

    @property
    def _elements(self) -> int:
        return self.body_elements + self.head_elements

    @staticmethod
    def _seen(window: int, tokens: float) -> float:
        return min(tokens, window) if window else tokens

    def step_s(self, speeds: Speeds, weights: str, rows: int, context: float) -> float:
        read = self.weight_bytes(weights) + rows * self.kv_bytes(context)
        flop = 2 * self._elements * rows
        return max(read / speeds.read_bytes_per_s, flop / speeds.bf16_flop_per_s)

    def prefill_s(self, speeds: Speeds, weights: str, tokens: int) -> float:
        reading = self.weight_bytes(weights) / speeds.read_bytes_per_s
        return max(reading, self.prefill_flop(tokens) / speeds.bf16_flop_per_s)


def model_needs(path: Path) -> Needs:
    file = read_gguf(path)
    try:
        config = config_from_gguf(file)
        tensors = list(file.tensors.values())
        matrices = {t.name: prod(t.dims) for t in tensors if len(t.dims) == 2}
        embedding = matrices.pop("token_embd.weight")
        head = matrices.pop("output.weight", embedding)
        file_bytes = sum(t.num_bytes for t in tensors)
        if "output.weight" in file.tensors:
            # An embedding of its own is looked up, not read.
            file_bytes -= file.tensors["token_embd.weight"].num_bytes
        layers = int(config["num_hidden_layers"])
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        window, every = config.get("sliding_window") or 0, config.get("sliding_window_pattern") or 0
        return Needs(
            file_bytes=file_bytes,
            body_elements=sum(matrices.values()),
            head_elements=head,
            windows=tuple(
                0 if not window or (every and (i + 1) % every == 0) else window
                for i in range(layers)
            ),
            kv_width=config["num_key_value_heads"] * head_dim,
            query_width=config["num_attention_heads"] * head_dim,
        )
    finally:
        file.close()


def measure_speeds(threads: int) -> Speeds:
    """Best of several: the machine's own, not what its neighbours leave."""
    import torch

    torch.set_num_threads(threads)
    words = torch.ones(_READ_BYTES // 4)
    m, k, n = _GEMM
    a, b = torch.ones(m, k, dtype=torch.bfloat16), torch.ones(k, n, dtype=torch.bfloat16)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    return Speeds(
        read_bytes_per_s=_READ_BYTES / _best_s(lambda: words.sum()),
        bf16_flop_per_s=2 * m * k * n / _best_s(lambda: torch.mm(a, b, out=out)),
    )


def fastest(found: Sequence[Speeds]) -> Speeds:
    """Of several moments of one run: what the machine can do when nothing disturbs it."""
    return Speeds(
        read_bytes_per_s=max(speeds.read_bytes_per_s for speeds in found),
        bf16_flop_per_s=max(speeds.bf16_flop_per_s for speeds in found),
    )


def roof(figure: str, unit: str, needs: Needs, speeds: Speeds, weights: str) -> float | None:
    """The best value of a figure of `peer_loads`, or None where bytes and products say nothing."""
    numbers = [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", figure)]
    if figure.startswith("prefill"):
        return numbers[0] / needs.prefill_s(speeds, weights, numbers[0])
    if figure.startswith("first token") and "among" not in figure:
        return 1e3 * needs.prefill_s(speeds, weights, numbers[0])
    if figure.startswith("decode"):
        return 1 / needs.step_s(speeds, weights, 1, numbers[0])
    if unit == "tok/s" and " x " in figure:
        count, prompt, new = numbers
        reading = count * needs.prefill_flop(prompt) / speeds.bf16_flop_per_s
        step = needs.step_s(speeds, weights, count, prompt + new / 2)
        if figure.endswith("while all decode"):
            return count / step
        steps = new * step
        return count * new / (reading + steps)
    return None


def _best_s(run: Callable[[], object]) -> float:
    run()
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best
