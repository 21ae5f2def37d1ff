"""Mixers whose memory is paged: attention, latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from osaurus.kernels.paged_attention import decode_attention, prefill_attention
from osaurus.kernels.rope import RotaryTable, apply_rope
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.topology.base import AttentionTopology, LayerTopology
from osaurus.topology.mla import LatentTopology

HIDDEN = 24
HEADS, KV_HEADS, DIM = 4, 2, 8
LATENT, ROTARY = 16, 8


class Weights:
    """Random matrices of one layer, by call order."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) / columns**0.5

    def vector(self, size: int) -> Tensor:
        return torch.randn(size, generator=self._generator)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for [T, in] rows, each row summed alone: its bits know no other row."""
    return (x.unsqueeze(1) * weight).sum(-1)


def rotary(dim: int) -> RotaryTable:
    frequencies = 1.0 / 100.0 ** (torch.arange(0, dim, 2) / dim)
    return RotaryTable(frequencies, 1.0, "cpu")


def attend(
    q: Tensor,
    written: Tensor,
    batch: ForwardBatch,
    memory: LayerMemory,
    k_dim: int,
    latent_dim: int | None = None,
) -> Tensor:
    """Write the rows' [T, K, k+v] and attend with q [T, H, Dk], scaled; returns [T, H, Dv]."""
    group = batch.groups[memory.group]
    flat = memory.storage.view(-1, memory.storage.shape[-1])
    flat.index_copy_(0, group.write_rows, written.reshape(-1, flat.shape[1]))
    if group.decode is not None:
        return decode_attention(q, memory.storage, group.decode, k_dim, latent_dim)
    assert group.prefill is not None
    return prefill_attention(q, memory.storage, group.prefill, k_dim, latent_dim)


class Attention:
    """Grouped-query attention, full or within a window."""

    def __init__(self, seed: int, window: int | None = None) -> None:
        weights = Weights(seed)
        self.topology: LayerTopology = AttentionTopology(
            num_kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, window=window
        )
        self._qkv = weights.matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)
        self._out = weights.matrix(HIDDEN, HEADS * DIM)
        self._rotary = rotary(DIM)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        return self.mix(product(x, self._qkv), batch, memory)

    def mix(self, qkv: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        """qkv: [T, (H + 2K) * D]."""
        cos, sin = self._rotary.at(batch.positions, batch.last_position)
        heads = qkv.view(-1, HEADS + 2 * KV_HEADS, DIM)
        qk = apply_rope(heads[:, : HEADS + KV_HEADS], cos, sin)
        written = torch.cat([qk[:, HEADS:], heads[:, HEADS + KV_HEADS :]], dim=-1)
        out = attend(qk[:, :HEADS] * DIM**-0.5, written, batch, memory, DIM)
        return product(out.reshape(-1, HEADS * DIM), self._out)


class LatentAttention:
    """Multi-head latent attention in its absorbed form: the cache holds latents only."""

    def __init__(self, seed: int) -> None:
        weights = Weights(seed)
        width = LATENT + ROTARY
        self.topology: LayerTopology = LatentTopology(
            num_kv_heads=1, k_dim=width, v_dim=0, latent_dim=LATENT
        )
        self._q = weights.matrix(HEADS * width, HIDDEN)
        self._down = weights.matrix(width, HIDDEN)
        self._out = weights.matrix(HIDDEN, HEADS * LATENT)
        self._rotary = rotary(ROTARY)

    def __call__(self, x: Tensor, batch: ForwardBatch, memory: LayerMemory) -> Tensor:
        width = LATENT + ROTARY
        cos, sin = self._rotary.at(batch.positions, batch.last_position)
        heads = torch.cat([product(x, self._q), product(x, self._down)], dim=-1)
        heads = heads.view(-1, HEADS + 1, width)
        turned = apply_rope(heads[..., LATENT:], cos, sin)
        heads = torch.cat([heads[..., :LATENT], turned], dim=-1)
        q = heads[:, :HEADS] * width**-0.5
        out = attend(q, heads[:, HEADS:], batch, memory, width, LATENT)
        return product(out.reshape(-1, HEADS * LATENT), self._out)
