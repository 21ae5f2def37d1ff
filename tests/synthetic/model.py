"""Layers of mixers behind `models.base.Model`, and the table of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from osaurus.models.base import ForwardBatch, ForwardOutput, LayerMemory
from osaurus.topology.base import LayerTopology
from synthetic.attend import HIDDEN, Attention, LatentAttention, Weights, product
from synthetic.recur import (
    ConvolutionalAttention,
    Gate,
    GatedDelta,
    LinearAttention,
    Parallel,
    Pool,
    ShortConv,
    StateSpace,
)

VOCAB = 61


class Mixer(Protocol):
    topology: LayerTopology

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor: ...


class SyntheticModel:
    """Implements `models.base.Model` in float32."""

    def __init__(self, mixers: Sequence[Mixer], max_context_tokens: int = 768) -> None:
        self.vocab_size = VOCAB
        self.max_context_tokens = max_context_tokens
        self.kv_dtype = torch.float32
        self.reads_coded_kv = False
        self.device = torch.device("cpu")
        self._mixers = tuple(mixers)
        self._embed = 2.0 * Weights(99).matrix(VOCAB, HIDDEN) * HIDDEN**0.5
        self._head = 2.0 * Weights(98).matrix(VOCAB, HIDDEN)

    @property
    def layers_topology(self) -> tuple[LayerTopology, ...]:
        return tuple(mixer.topology for mixer in self._mixers)

    @property
    def nbytes(self) -> int:
        return self._embed.nbytes + self._head.nbytes

    def reads_block_tables(self, kv: Sequence[LayerMemory], *, prefill: bool) -> bool:
        return False

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> ForwardOutput:
        hidden = self._embed[batch.token_ids]
        for mixer, memory in zip(self._mixers, kv, strict=True):
            hidden = hidden + mixer(_norm(hidden), batch, memory)
        if batch.logits_rows.numel() == 0:
            return ForwardOutput(logits=None)
        rows = _norm(hidden.index_select(0, batch.logits_rows))
        return ForwardOutput(logits=product(rows, self._head))


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


#: Every kind of memory, as the families that have it arrange it.
FAMILIES: Mapping[str, Callable[[], SyntheticModel]] = {
    "full": lambda: SyntheticModel([Attention(1), Attention(2)]),
    "window_mix": lambda: SyntheticModel([Attention(1, 24), Attention(2), Attention(3, 24)]),
    "latent": lambda: SyntheticModel([LatentAttention(1), LatentAttention(2)]),
    "short_conv": lambda: SyntheticModel([ShortConv(1), Attention(2), ShortConv(3)]),
    "gated_delta": lambda: SyntheticModel([GatedDelta(1), GatedDelta(2), Attention(3)]),
    "state_space": lambda: SyntheticModel([StateSpace(1), StateSpace(2)]),
    "linear_attention": lambda: SyntheticModel([LinearAttention(1), LinearAttention(2)]),
    "pool": lambda: SyntheticModel([Attention(1, 24), Pool(2, 24, 4, True), Pool(4, 24, 8, False)]),
    "convolutional": lambda: SyntheticModel(
        [ConvolutionalAttention(1), Gate(3), ConvolutionalAttention(4)]
    ),
    "parallel": lambda: SyntheticModel([Parallel(1), Gate(3), Parallel(4)]),
}


def build(family: str) -> SyntheticModel:
    return FAMILIES[family]()
