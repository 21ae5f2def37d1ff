"""Qwen3 mixture of experts (Qwen Team 2025, arXiv:2505.09388).

Qwen3's attention, with queries and keys normed a head; most MLPs are E experts of which a
softmax router gives every row the k likeliest.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.kernels.moe import route_softmax, router_scores
from osaurus.kernels.rope import apply_rope
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.decoder import Angles, DecoderModel, load_decoder
from osaurus.models.experts import Experts
from osaurus.models.fields import DecoderConfig, common_fields, require_counts
from osaurus.models.layers import GatedMlp, RmsNorm, attend, store
from osaurus.models.loading import WeightLoader
from osaurus.topology.base import AttentionTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Published spellings. `sparse[i]` says that layer i has experts."""

    sliding_window: int | None
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse: tuple[bool, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3MoeConfig:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        experts = config.get("num_experts", config.get("num_local_experts"))
        config = {**config, "num_experts": experts}
        require_counts(config, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
        step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
        windowed = config.get("use_sliding_window") and config.get("sliding_window")
        return cls(
            **common_fields(config, {"max_position_embeddings": 32768}),
            sliding_window=int(config["sliding_window"]) if windowed else None,
            num_experts=config["num_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            moe_intermediate_size=config["moe_intermediate_size"],
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
            sparse=tuple(
                layer not in dense and (layer + 1) % step == 0
                for layer in range(config["num_hidden_layers"])
            ),
        )


class Qwen3MoeMlp:
    """The experts of a layer behind their router."""

    def __init__(self, config: Qwen3MoeConfig, loader: WeightLoader, prefix: str) -> None:
        count, hidden = config.num_experts, config.hidden_size
        self._router = loader.tensor(f"{prefix}.gate.weight", (count, hidden))
        self._experts = Experts(loader, prefix, count, hidden, config.moe_intermediate_size)
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob

    @property
    def nbytes(self) -> int:
        return self._router.nbytes + self._experts.nbytes

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        """x: [T, C] in the compute dtype; returns [T, C] float32."""
        scores = router_scores(x, self._router)
        experts, weights = route_softmax(scores, self._top_k, self._normalize)
        return self._experts(x, experts, weights, num_small)


class Qwen3MoeBlock:
    """Implements `models.decoder.Block`."""

    def __init__(
        self, config: Qwen3MoeConfig, loader: WeightLoader, prefix: str, sparse: bool
    ) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        eps = config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._dtype = dim, loader.dtype
        self.topology = AttentionTopology(
            num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim, window=config.sliding_window
        )
        self._input_norm = RmsNorm(loader, f"{prefix}.input_layernorm", hidden, eps)
        self._post_norm = RmsNorm(loader, f"{prefix}.post_attention_layernorm", hidden, eps)
        self._q_norm = RmsNorm(loader, f"{prefix}.self_attn.q_norm", dim, eps)
        self._k_norm = RmsNorm(loader, f"{prefix}.self_attn.k_norm", dim, eps)
        self._qkv = loader.linear(
            [f"{prefix}.self_attn.{name}_proj" for name in "qkv"],
            [self._heads * dim, self._kv_heads * dim, self._kv_heads * dim],
            hidden,
        )
        self._out = loader.linear([f"{prefix}.self_attn.o_proj"], [hidden], self._heads * dim)
        if sparse:
            self._mlp = Qwen3MoeMlp(config, loader, f"{prefix}.mlp")
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
        q = apply_rope(self._q_norm(q.float(), torch.float32), *angles[0])
        k = apply_rope(self._k_norm(k.float(), torch.float32), *angles[0])
        store(torch.cat([k.to(v.dtype), v], dim=-1), batch, memory)
        return q * self._dim**-0.5


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Qwen3MoeConfig.from_dict(config)
    blocks = [
        Qwen3MoeBlock(settings, loader, f"model.layers.{layer}", sparse)
        for layer, sparse in enumerate(settings.sparse)
    ]
    return load_decoder(settings, loader, blocks)
