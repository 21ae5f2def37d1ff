"""GLM-4 dense (GLM Team 2024, arXiv:2406.12793): `glm4`, and `glm` without the post norms.

Biases on queries, keys and values; half of each head turns, in adjacent pairs; GLM-4-0414
norms each sublayer's output as well.

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
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4Config(DecoderConfig):
    """Published spellings."""

    has_post_norms: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Glm4Config:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        has_post_norms = config.get("model_type") != "glm"
        return cls(**common_fields(config, DEFAULTS), has_post_norms=has_post_norms)


class Glm4Block:
    """Implements `models.decoder.Block`."""

    def __init__(self, config: Glm4Config, loader: WeightLoader, prefix: str) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._dtype = dim, loader.dtype
        self.topology = AttentionTopology(num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(loader, f"{prefix}.{name}", hidden, config.rms_norm_eps)

        self._input_norm = norm("input_layernorm")
        self._pre_mlp_norm = norm("post_attention_layernorm")
        self._post_attention_norm = self._post_mlp_norm = None
        if config.has_post_norms:
            self._post_attention_norm = norm("post_self_attn_layernorm")
            self._post_mlp_norm = norm("post_mlp_layernorm")
        self._qkv = load_reordered(
            loader,
            [f"{prefix}.self_attn.{name}_proj" for name in "qkv"],
            [
                half_split_rows(self._heads, dim, 0, config.rotary_dim),
                half_split_rows(self._kv_heads, dim, 0, config.rotary_dim),
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
        out = self._out(attend(q, batch, memory, self._dim).flatten(1), batch.num_small)
        hidden = hidden + _normed(out, self._post_attention_norm)
        out = self._mlp(self._pre_mlp_norm(hidden, self._dtype), batch.num_small)
        return hidden + _normed(out, self._post_mlp_norm)

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


def _normed(out: Tensor, norm: RmsNorm | None) -> Tensor:
    return out if norm is None else norm(out.float(), torch.float32)


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Glm4Config.from_dict(config)
    blocks = [
        Glm4Block(settings, loader, f"model.layers.{layer}")
        for layer in range(settings.num_hidden_layers)
    ]
    return load_decoder(settings, loader, blocks)
