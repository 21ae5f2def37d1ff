"""Ernie 4.5 dense (Baidu 2025): Llama's block, its rotary pairs side by side.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.kernels.rope import apply_rope
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.decoder import Angles, DecoderModel, load_decoder
from osaurus.models.fields import DecoderConfig, common_fields
from osaurus.models.layers import (
    GatedMlp,
    RmsNorm,
    attend,
    half_split_rows,
    load_reordered,
    store,
)
from osaurus.models.loading import WeightLoader
from osaurus.topology.base import AttentionTopology

#: What published configs may leave out.
DEFAULTS = {
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ernie45Config(DecoderConfig):
    """Published spellings."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Ernie45Config:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        return cls(**common_fields(config, DEFAULTS))


class Ernie45Block:
    """Implements `models.decoder.Block`."""

    def __init__(self, config: Ernie45Config, loader: WeightLoader, prefix: str) -> None:
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._dtype = dim, loader.dtype
        self.topology = AttentionTopology(num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim)
        self._input_norm = RmsNorm(loader, f"{prefix}.input_layernorm", hidden, eps)
        self._post_norm = RmsNorm(loader, f"{prefix}.post_attention_layernorm", hidden, eps)
        self._qkv = load_reordered(
            loader,
            [f"{prefix}.self_attn.{name}_proj" for name in "qkv"],
            [
                half_split_rows(self._heads, dim, 0, dim),
                half_split_rows(self._kv_heads, dim, 0, dim),
                None,
            ],
            [self._heads * dim, self._kv_heads * dim, self._kv_heads * dim],
            hidden,
        )
        self._out = loader.linear([f"{prefix}.self_attn.o_proj"], [hidden], self._heads * dim)
        self._mlp = GatedMlp(loader, f"{prefix}.mlp", hidden, config.intermediate_size)

    @property
    def nbytes(self) -> int:
        return self._qkv.nbytes + self._out.nbytes + self._mlp.nbytes

    def __call__(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        q = self.remember(hidden, angles, batch, memory)
        attended = attend(q, batch, memory, self._dim).flatten(1)
        hidden = hidden + self._out(attended, batch.num_small)
        return hidden + self._mlp(self._post_norm(hidden, self._dtype), batch.num_small)

    def remember(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """Put the rows' keys and values into their slots; return q [T, H, D] float32."""
        x = self._input_norm(hidden, self._dtype)
        heads = self._qkv(x, batch.num_small).view(x.shape[0], -1, self._dim)
        qk, v = heads.split([self._heads + self._kv_heads, self._kv_heads], dim=1)
        q, k = apply_rope(qk.float(), *angles[0]).split([self._heads, self._kv_heads], dim=1)
        store(torch.cat([k.to(v.dtype), v], dim=-1), batch, memory)
        return q * self._dim**-0.5


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Ernie45Config.from_dict(config)
    blocks = [
        Ernie45Block(settings, loader, f"model.layers.{layer}")
        for layer in range(settings.num_hidden_layers)
    ]
    return load_decoder(settings, loader, blocks)
