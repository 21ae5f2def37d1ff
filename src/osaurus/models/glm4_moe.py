"""GLM-4.5 and 4.6 (GLM Team 2025, arXiv:2508.06471): experts behind a sigmoid router.

Half of each head turns, in two halves; the first layers are dense, the others have routed
experts and a shared one.

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
from osaurus.models.experts import SharedMoe, SigmoidRouting
from osaurus.models.fields import DecoderConfig, common_fields
from osaurus.models.layers import (
    GatedMlp,
    RmsNorm,
    attend,
    skip_draft_layers,
    store,
)
from osaurus.models.loading import WeightLoader
from osaurus.topology.base import AttentionTopology

#: What published configs may leave out.
DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    """Published spellings."""

    use_qk_norm: bool
    first_k_dense_replace: int
    routing: SigmoidRouting

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Glm4MoeConfig:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        return cls(
            **common_fields(config, DEFAULTS),
            use_qk_norm=bool(config.get("use_qk_norm", False)),
            first_k_dense_replace=int(config.get("first_k_dense_replace", 1)),
            routing=SigmoidRouting.from_dict(config),
        )


class Glm4MoeBlock:
    """Implements `models.decoder.Block`."""

    def __init__(
        self, config: Glm4MoeConfig, loader: WeightLoader, prefix: str, sparse: bool
    ) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        eps = config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._dtype = dim, loader.dtype
        self.topology = AttentionTopology(num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim)
        self._input_norm = RmsNorm(loader, f"{prefix}.input_layernorm", hidden, eps)
        self._post_norm = RmsNorm(loader, f"{prefix}.post_attention_layernorm", hidden, eps)
        self._q_norm = self._k_norm = None
        if config.use_qk_norm:
            self._q_norm = RmsNorm(loader, f"{prefix}.self_attn.q_norm", dim, eps)
            self._k_norm = RmsNorm(loader, f"{prefix}.self_attn.k_norm", dim, eps)
        self._qkv = loader.linear(
            [f"{prefix}.self_attn.{name}_proj" for name in "qkv"],
            [self._heads * dim, self._kv_heads * dim, self._kv_heads * dim],
            hidden,
        )
        self._out = loader.linear([f"{prefix}.self_attn.o_proj"], [hidden], self._heads * dim)
        if sparse:
            self._mlp = SharedMoe(config.routing, loader, f"{prefix}.mlp", hidden)
        else:
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
        q, k, v = heads.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        q, k = q.float(), k.float()
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q, torch.float32), self._k_norm(k, torch.float32)
        q, k = apply_rope(q, *angles[0]), apply_rope(k, *angles[0])
        store(torch.cat([k.to(v.dtype), v], dim=-1), batch, memory)
        return q * self._dim**-0.5


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Glm4MoeConfig.from_dict(config)
    skip_draft_layers(loader, config)
    blocks = [
        Glm4MoeBlock(
            settings,
            loader,
            f"model.layers.{layer}",
            sparse=layer >= settings.first_k_dense_replace,
        )
        for layer in range(settings.num_hidden_layers)
    ]
    return load_decoder(settings, loader, blocks)
