"""OLMo 2 and 3 (OLMo Team 2024, arXiv:2501.00656): norms after each sublayer, none before.

Queries and keys are normed over all heads together. OLMo 3 gives most layers a window; only
the full ones stretch their rotary positions.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from osaurus.kernels.rope import apply_rope
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.decoder import Angles, DecoderModel, load_decoder, rotary_table
from osaurus.models.fields import DecoderConfig, common_fields, layer_windows
from osaurus.models.layers import GatedMlp, RmsNorm, attend, store
from osaurus.models.loading import WeightLoader
from osaurus.topology.base import AttentionTopology

#: What published configs may leave out.
DEFAULTS = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
#: Layers from one full layer of OLMo 3 to the next, where the config does not list them.
PATTERN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo3Config(DecoderConfig):
    """Published spellings. The shared rope fields are the full layers'."""

    windows: tuple[int | None, ...]
    local_theta: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Olmo3Config:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        if config.get("model_type") == "olmo2":
            config = {**config, "sliding_window": None, "layer_types": None}
        # transformers 5 keeps one mapping for each kind of layer.
        kinds = config.get("rope_parameters") or {}
        local = (kinds.get("sliding_attention") or {}).get("rope_theta")
        if "full_attention" in kinds:
            config = {**config, "rope_parameters": kinds["full_attention"]}
        common = common_fields(config, DEFAULTS)
        return cls(
            **common,
            windows=layer_windows(config, PATTERN),
            local_theta=float(local or common["rope_theta"]),
        )


class Olmo3Block:
    """Implements `models.decoder.Block`."""

    def __init__(
        self, config: Olmo3Config, loader: WeightLoader, prefix: str, window: int | None
    ) -> None:
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._dtype = dim, loader.dtype
        self._rotary = 0 if window is None else 1
        self.topology = AttentionTopology(
            num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim, window=window
        )
        q_size, kv_size = self._heads * dim, self._kv_heads * dim
        self._q_norm = RmsNorm(loader, f"{prefix}.self_attn.q_norm", q_size, eps)
        self._k_norm = RmsNorm(loader, f"{prefix}.self_attn.k_norm", kv_size, eps)
        self._attention_norm = RmsNorm(loader, f"{prefix}.post_attention_layernorm", hidden, eps)
        self._mlp_norm = RmsNorm(loader, f"{prefix}.post_feedforward_layernorm", hidden, eps)
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        self._qkv = loader.linear(names, [q_size, kv_size, kv_size], hidden)
        self._out = loader.linear([f"{prefix}.self_attn.o_proj"], [hidden], q_size)
        self._mlp = GatedMlp(loader, f"{prefix}.mlp", hidden, config.intermediate_size)

    @property
    def nbytes(self) -> int:
        return self._qkv.nbytes + self._out.nbytes + self._mlp.nbytes

    def __call__(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        q = self.remember(hidden, angles, batch, memory)
        out = self._out(attend(q, batch, memory, self._dim).flatten(1), batch.num_small)
        hidden = hidden + self._attention_norm(out.float(), torch.float32)
        out = self._mlp(hidden.to(self._dtype), batch.num_small)
        return hidden + self._mlp_norm(out.float(), torch.float32)

    def remember(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """Put the rows' keys and values into their slots; return q [T, H, D] float32."""
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        x = self._qkv(hidden.to(self._dtype), batch.num_small)
        q, k, v = x.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        cos, sin = angles[self._rotary]
        q = apply_rope(self._q_norm(q.float(), torch.float32).view(-1, heads, dim), cos, sin)
        k = apply_rope(self._k_norm(k.float(), torch.float32).view(-1, kv_heads, dim), cos, sin)
        store(torch.cat([k.to(v.dtype), v.reshape(-1, kv_heads, dim)], dim=-1), batch, memory)
        return q * dim**-0.5


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Olmo3Config.from_dict(config)
    local = replace(settings, rope_theta=settings.local_theta, rope_scaling=None)
    blocks = [
        Olmo3Block(settings, loader, f"model.layers.{layer}", window)
        for layer, window in enumerate(settings.windows)
    ]
    rotary = [rotary_table(settings, loader), rotary_table(local, loader)]
    return load_decoder(settings, loader, blocks, rotary=rotary)
