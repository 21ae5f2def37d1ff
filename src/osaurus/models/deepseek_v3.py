"""DeepSeek-V3 and R1, Kimi K2: latent attention and experts behind a sigmoid router.

DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1; Kimi Team 2025 (arXiv:2507.20534). Memory
holds one latent a token. Attention runs absorbed (DeepSeek-V2, arXiv:2405.04434, appendix B):
the up-projection of keys is applied to the queries and that of values to the result, so a
latent is never expanded and rows of a prompt and of an answer read the same thing.

Letters: T rows, H heads, L latent dim, R rotary dim, Dn the part of a head that does not turn,
Dv value dim, C hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.kernels.linear import linear_heads
from osaurus.kernels.rope import apply_rope
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.decoder import Angles, DecoderModel, load_decoder
from osaurus.models.experts import SharedMoe, SigmoidRouting
from osaurus.models.fields import DecoderConfig, common_fields, require_counts
from osaurus.models.layers import (
    GatedMlp,
    RmsNorm,
    attend,
    half_split_rows,
    load_reordered,
    skip_draft_layers,
    store,
)
from osaurus.models.loading import WeightLoader
from osaurus.quant.grouped import GroupedWeight
from osaurus.topology.mla import LatentTopology

#: The norms inside attention keep this one, whatever the config's `rms_norm_eps`.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config(DecoderConfig):
    """Published spellings. `scale` is what queries are multiplied by."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    scale: float
    first_k_dense_replace: int
    routing: SigmoidRouting

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DeepseekV3Config:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        names = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        require_counts(config, names)
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        common = common_fields({**config, "head_dim": rope}, {"max_position_embeddings": 4096})
        return cls(
            **common,
            q_lora_rank=config.get("q_lora_rank"),
            kv_lora_rank=config["kv_lora_rank"],
            qk_nope_head_dim=nope,
            v_head_dim=config["v_head_dim"],
            rope_interleave=bool(config.get("rope_interleave", True)),
            scale=_scale(nope + rope, common["rope_scaling"]),
            first_k_dense_replace=int(config.get("first_k_dense_replace", 3)),
            routing=SigmoidRouting.from_dict(config),
        )


def _scale(head_dim: int, scaling: Mapping[str, Any] | None) -> float:
    """Stretched rotary positions flatten the softmax; `mscale_all_dim` takes that back, once
    for the queries and once for the keys."""
    scaling = scaling or {}
    factor, mscale = scaling.get("factor"), scaling.get("mscale_all_dim")
    magnitude = 0.1 * mscale * math.log(factor) + 1 if mscale and factor and factor > 1 else 1.0
    return head_dim**-0.5 * magnitude**2


class LatentAttention:
    """Multi-head latent attention over one kv head of latent and rotary part."""

    def __init__(self, config: DeepseekV3Config, loader: WeightLoader, prefix: str) -> None:
        hidden, rank = config.hidden_size, config.q_lora_rank
        self._heads, self._latent = config.num_attention_heads, config.kv_lora_rank
        self._nope, self._rope = config.qk_nope_head_dim, config.rotary_dim
        self._scale, self._dtype = config.scale, loader.dtype
        width = self._latent + self._rope
        self.topology = LatentTopology(
            num_kv_heads=1, k_dim=width, v_dim=0, latent_dim=self._latent
        )
        queries = self._heads * (self._nope + self._rope)
        q_order = kv_order = None
        if config.rope_interleave:
            q_order = half_split_rows(self._heads, self._nope + self._rope, self._nope, self._rope)
            kv_order = half_split_rows(1, width, self._latent, self._rope)
        # What q is made of, and the latent: both from the layer's input, as one product.
        self._down = load_reordered(
            loader,
            [f"{prefix}.q_a_proj" if rank else f"{prefix}.q_proj", f"{prefix}.kv_a_proj_with_mqa"],
            [None if rank else q_order, kv_order],
            [rank or queries, width],
            hidden,
        )
        self._q_norm = self._q_up = None
        if rank:
            self._q_norm = RmsNorm(loader, f"{prefix}.q_a_layernorm", rank, LATENT_NORM_EPS)
            self._q_up = load_reordered(loader, [f"{prefix}.q_b_proj"], [q_order], [queries], rank)
        self._kv_norm = RmsNorm(loader, f"{prefix}.kv_a_layernorm", self._latent, LATENT_NORM_EPS)
        self._up_keys, self._up_values = _up_projections(config, loader, prefix)
        self._out = loader.linear([f"{prefix}.o_proj"], [hidden], self._heads * config.v_head_dim)

    @property
    def nbytes(self) -> int:
        up = self._up_keys.nbytes + self._up_values.nbytes
        q_up = self._q_up.nbytes if self._q_up is not None else 0
        return self._down.nbytes + q_up + up + self._out.nbytes

    def __call__(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """x: [T, C] normed, in the compute dtype; returns the same."""
        q, small = self.remember(x, angles, batch, memory), batch.num_small
        turned = apply_rope(q[..., self._nope :].float(), *angles[0])
        absorbed = linear_heads(q[..., : self._nope], self._up_keys, small).float()
        q = torch.cat([absorbed, turned], dim=-1) * self._scale
        latent = attend(q, batch, memory, q.shape[-1], self._latent)
        values = linear_heads(latent, self._up_values, small)
        return self._out(values.flatten(1), small)

    def remember(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """Put the rows' latents into their slots; return q [T, H, Dn + R], not yet turned."""
        small, width = batch.num_small, self._latent + self._rope
        q, down = self._down(x, small).split([self._down.out_features - width, width], dim=-1)
        latent = self._kv_norm(down[:, : self._latent].float(), self._dtype)
        turned = apply_rope(down[:, None, self._latent :].float(), *angles[0])
        store(torch.cat([latent.unsqueeze(1), turned.to(self._dtype)], dim=-1), batch, memory)
        if self._q_norm is not None and self._q_up is not None:
            q = self._q_up(self._q_norm(q.float(), self._dtype), small)
        return q.reshape(x.shape[0], self._heads, self._nope + self._rope)


def _up_projections(
    config: DeepseekV3Config, loader: WeightLoader, prefix: str
) -> tuple[Tensor, Tensor]:
    """From the latent to keys [H, Dn, L] and to values [H, L, Dv], dense: one stored matrix
    of all heads, or two stacks as MLX keeps them, keys in the absorbed direction."""
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    nope, v_dim = config.qk_nope_head_dim, config.v_head_dim
    if loader.has(f"{prefix}.embed_q.weight"):
        keys = loader.stack(f"{prefix}.embed_q.weight", (heads, latent, nope))
        values = loader.stack(f"{prefix}.unembed_out.weight", (heads, v_dim, latent))
        up_keys = torch.stack([_dense(key, loader.dtype) for key in keys]).transpose(1, 2)
        up_values = torch.stack([_dense(value, loader.dtype) for value in values])
        loader.skip(f"{prefix}.kv_b_proj.weight")  # some files have both
    else:
        stored = loader.matrix(f"{prefix}.kv_b_proj.weight", (heads * (nope + v_dim), latent))
        both = _dense(stored, loader.dtype).view(heads, nope + v_dim, latent)
        up_keys, up_values = both.split([nope, v_dim], dim=1)
    return up_keys.contiguous(), up_values.transpose(1, 2).contiguous()


def _dense(weight: GroupedWeight | Tensor, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, GroupedWeight) else weight


class DeepseekV3Block:
    """Implements `models.decoder.Block`."""

    def __init__(
        self, config: DeepseekV3Config, loader: WeightLoader, prefix: str, sparse: bool
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._dtype = loader.dtype
        self._input_norm = RmsNorm(loader, f"{prefix}.input_layernorm", hidden, eps)
        self._post_norm = RmsNorm(loader, f"{prefix}.post_attention_layernorm", hidden, eps)
        self._attention = LatentAttention(config, loader, f"{prefix}.self_attn")
        self.topology = self._attention.topology
        if sparse:
            self._mlp = SharedMoe(config.routing, loader, f"{prefix}.mlp", hidden)
        else:
            self._mlp = GatedMlp(loader, f"{prefix}.mlp", hidden, config.intermediate_size)

    @property
    def nbytes(self) -> int:
        return self._attention.nbytes + self._mlp.nbytes

    def __call__(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        x = self._input_norm(hidden, self._dtype)
        hidden = hidden + self._attention(x, angles, batch, memory)
        return hidden + self._mlp(self._post_norm(hidden, self._dtype), batch.num_small)

    def remember(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> object:
        x = self._input_norm(hidden, self._dtype)
        return self._attention.remember(x, angles, batch, memory)


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = DeepseekV3Config.from_dict(config)
    skip_draft_layers(loader, config)
    blocks = [
        DeepseekV3Block(
            settings,
            loader,
            f"model.layers.{layer}",
            sparse=layer >= settings.first_k_dense_replace,
        )
        for layer in range(settings.num_hidden_layers)
    ]
    return load_decoder(settings, loader, blocks)
