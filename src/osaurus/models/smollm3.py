"""SmolLM3 (Hugging Face 2025): Llama's block, some layers without positions.

Layers that do not turn their queries and keys follow NoPE (Kazemnejad et al. 2023,
arXiv:2305.19466), interleaved as in arXiv:2501.18795.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.rope import apply_rope
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.decoder import Angles, DecoderModel, load_decoder
from osaurus.models.fields import DecoderConfig, common_fields, layer_windows
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
    "rope_theta": 2_000_000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """Published spellings. `turns[i]` says that layer i has rotary positions;
    `rope_interleaved` that rotary pairs lie side by side, as a GGUF has them."""

    turns: tuple[bool, ...]
    rope_interleaved: bool
    windows: tuple[int | None, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> SmolLM3Config:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        common = common_fields(config, DEFAULTS)
        layers = common["num_hidden_layers"]
        interval = int(config.get("no_rope_layer_interval") or 4)
        # Named for the layers without, it counts those with: 1 turns.
        turns = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
        if len(turns) != layers:
            raise UnsupportedBundle(f"config.json: no_rope_layers names {len(turns)} layers")
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        kinds = ["full_attention" if turn else "sliding_attention" for turn in turns]
        types = (config.get("layer_types") or kinds) if window else ["full_attention"] * layers
        return cls(
            **common,
            turns=tuple(bool(turn) for turn in turns),
            rope_interleaved=bool(config.get("rope_interleaved", False)),
            windows=layer_windows({**config, "layer_types": types}, 1),
        )


class SmolLM3Block:
    """Implements `models.decoder.Block`."""

    def __init__(
        self,
        config: SmolLM3Config,
        loader: WeightLoader,
        prefix: str,
        turns: bool,
        window: int | None,
    ) -> None:
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._dtype, self._turns = dim, loader.dtype, turns
        self.topology = AttentionTopology(
            num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim, window=window
        )
        self._input_norm = RmsNorm(loader, f"{prefix}.input_layernorm", hidden, eps)
        self._post_norm = RmsNorm(loader, f"{prefix}.post_attention_layernorm", hidden, eps)
        orders: list[Tensor | None] = [None, None, None]
        if config.rope_interleaved:
            orders[:2] = [half_split_rows(n, dim, 0, dim) for n in (self._heads, self._kv_heads)]
        self._qkv = load_reordered(
            loader,
            [f"{prefix}.self_attn.{name}_proj" for name in "qkv"],
            orders,
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
        qk = apply_rope(qk.float(), *angles[0]) if self._turns else qk.float()
        q, k = qk.split([self._heads, self._kv_heads], dim=1)
        store(torch.cat([k.to(v.dtype), v], dim=-1), batch, memory)
        return q * self._dim**-0.5


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = SmolLM3Config.from_dict(config)
    layers = zip(settings.turns, settings.windows, strict=True)
    blocks = [
        SmolLM3Block(settings, loader, f"model.layers.{layer}", turns, window)
        for layer, (turns, window) in enumerate(layers)
    ]
    return load_decoder(settings, loader, blocks)
