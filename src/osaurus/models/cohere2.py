"""Command R7B and Command A (Cohere 2025, arXiv:2504.00698): attention beside the MLP.

One centred norm feeds both; local layers turn in adjacent pairs, full ones have no positions;
logits are scaled.

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
from osaurus.models.fields import DecoderConfig, common_fields, layer_windows
from osaurus.models.layers import (
    CentredNorm,
    GatedMlp,
    attend,
    half_split_rows,
    load_reordered,
    store,
)
from osaurus.models.loading import WeightLoader
from osaurus.topology.base import AttentionTopology

#: What published configs may leave out.
DEFAULTS = {
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
#: Layers from one full layer to the next, where the config does not list them.
PATTERN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohere2Config(DecoderConfig):
    """Published spellings; `rms_norm_eps` is the config's `layer_norm_eps`."""

    logit_scale: float
    windows: tuple[int | None, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Cohere2Config:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        config = {**DEFAULTS, **config, "rms_norm_eps": config.get("layer_norm_eps", 1e-5)}
        pattern = int(config.get("sliding_window_pattern") or PATTERN)
        return cls(
            **common_fields(config, DEFAULTS),
            logit_scale=float(config.get("logit_scale", 0.0625)),
            windows=layer_windows(config, pattern),
        )


class Cohere2Block:
    """Implements `models.decoder.Block`."""

    def __init__(
        self, config: Cohere2Config, loader: WeightLoader, prefix: str, window: int | None
    ) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._dtype, self._turns = dim, loader.dtype, window is not None
        self.topology = AttentionTopology(
            num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim, window=window
        )
        self._norm = CentredNorm(loader, f"{prefix}.input_layernorm", hidden, config.rms_norm_eps)
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
        x, small = self._norm(hidden, self._dtype), batch.num_small
        q = self._remember(x, angles, batch, memory)
        attended = self._out(attend(q, batch, memory, self._dim).flatten(1), small)
        return hidden + attended + self._mlp(x, small)

    def remember(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> object:
        return self._remember(self._norm(hidden, self._dtype), angles, batch, memory)

    def _remember(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """Put the rows' keys and values into their slots; return q [T, H, D] float32."""
        heads = self._qkv(x, batch.num_small).view(x.shape[0], -1, self._dim)
        qk, v = heads.split([self._heads + self._kv_heads, self._kv_heads], dim=1)
        qk = apply_rope(qk.float(), *angles[0]) if self._turns else qk.float()
        q, k = qk.split([self._heads, self._kv_heads], dim=1)
        store(torch.cat([k.to(v.dtype), v], dim=-1), batch, memory)
        return q * self._dim**-0.5


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Cohere2Config.from_dict(config)
    blocks = [
        Cohere2Block(settings, loader, f"model.layers.{layer}", window)
        for layer, window in enumerate(settings.windows)
    ]
    return load_decoder(
        settings,
        loader,
        blocks,
        norm=CentredNorm(loader, "model.norm", settings.hidden_size, settings.rms_norm_eps),
        finish=lambda logits: logits * settings.logit_scale,
    )
