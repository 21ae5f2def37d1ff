"""LFM2, dense and with experts (Liquid AI 2025, arXiv:2511.23404).

Most layers mix tokens by a gated convolution over the last few of them, some by attention with
queries and keys normed a head. The MLP's width follows from the published one by a rule.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.moe import route_sigmoid, router_scores
from osaurus.kernels.rope import apply_rope
from osaurus.kernels.short_conv import short_conv
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.decoder import Angles, DecoderModel, load_decoder
from osaurus.models.experts import Experts
from osaurus.models.fields import DecoderConfig, common_fields, require_counts
from osaurus.models.layers import GatedMlp, RmsNorm, attend, load_taps, store
from osaurus.models.loading import WeightLoader
from osaurus.topology.base import AttentionTopology
from osaurus.topology.recurrent import short_conv as short_conv_topology

#: What published configs may leave out.
DEFAULTS: Mapping[str, Any] = {
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "max_position_embeddings": 128_000,
    "conv_L_cache": 3,
}
#: gate, up and down; MLX writes the usual names.
MLP_NAMES = ("w1", "w3", "w2")
#: Added to the sum of a row's gates before they are divided by it.
LEAST_SUM = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Experts:
    """Published spellings; layers from `num_dense_layers` on have experts."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_dense_layers: int
    norm_topk_prob: bool
    use_expert_bias: bool
    routed_scaling_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """Published spellings; `intermediate_size` is the MLP's own. `attends[i]` says that layer i
    is attention."""

    attends: tuple[bool, ...]
    conv_L_cache: int
    experts: Lfm2Experts | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Lfm2Config:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        has_experts = config.get("model_type") == "lfm2_moe"
        inner = config.get("intermediate_size") if has_experts else _width(config)
        config = {
            **DEFAULTS,
            **{name: value for name, value in config.items() if value is not None},
        }
        tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
        theta = config.get("theta") or config["rope_theta"]
        config |= {
            "rms_norm_eps": config["norm_eps"],
            "rope_theta": theta,
            "tie_word_embeddings": tied,
            "intermediate_size": inner,
        }
        require_counts(config, ["conv_L_cache"])
        return cls(
            **common_fields(config, {}),
            attends=_attends(config),
            conv_L_cache=config["conv_L_cache"],
            experts=_experts(config) if has_experts else None,
        )


def _width(config: Mapping[str, Any]) -> int | None:
    """The MLP's inner width: two thirds of the published one, times a factor, rounded up."""
    inner = config.get("block_ff_dim") or config.get("intermediate_size")
    if not isinstance(inner, int) or not config.get("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return inner
    inner = int(float(factor) * inner)
    step = int(config.get("block_multiple_of", 256))
    return -(-inner // step) * step


def _attends(config: Mapping[str, Any]) -> tuple[bool, ...]:
    layers = int(config["num_hidden_layers"])
    if types := config.get("layer_types"):
        if len(types) != layers or set(types) - {"full_attention", "conv"}:
            raise UnsupportedBundle(
                f"config.json: layer_types {sorted(set(types))} of {len(types)} layers"
            )
        return tuple(kind == "full_attention" for kind in types)
    chosen = config.get("full_attn_idxs", range(layers))
    return tuple(layer in chosen for layer in range(layers))


def _experts(config: Mapping[str, Any]) -> Lfm2Experts:
    require_counts(config, ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
    return Lfm2Experts(
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        num_dense_layers=int(config.get("num_dense_layers", 2)),
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        use_expert_bias=bool(config.get("use_expert_bias", True)),
        routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
    )


class Lfm2Attention:
    """Grouped-query attention whose queries and keys are normed a head."""

    def __init__(self, config: Lfm2Config, loader: WeightLoader, prefix: str) -> None:
        dim = config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = dim
        self.topology = AttentionTopology(num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim)
        self._q_norm = RmsNorm(loader, f"{prefix}.q_layernorm", dim, config.rms_norm_eps)
        self._k_norm = RmsNorm(loader, f"{prefix}.k_layernorm", dim, config.rms_norm_eps)
        self._qkv = loader.linear(
            [f"{prefix}.{name}_proj" for name in "qkv"],
            [self._heads * dim, self._kv_heads * dim, self._kv_heads * dim],
            config.hidden_size,
        )
        self._out = loader.linear([f"{prefix}.out_proj"], [config.hidden_size], self._heads * dim)

    @property
    def nbytes(self) -> int:
        return self._qkv.nbytes + self._out.nbytes

    def __call__(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """x: [T, C] in the compute dtype; returns the same."""
        q = self.remember(x, angles, batch, memory)
        return self._out(attend(q, batch, memory, self._dim).flatten(1), batch.num_small)

    def remember(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """Put the rows' keys and values into their slots; return q [T, H, D] float32."""
        heads = self._qkv(x, batch.num_small).view(x.shape[0], -1, self._dim)
        q, k, v = heads.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        q = apply_rope(self._q_norm(q.float(), torch.float32), *angles[0])
        k = apply_rope(self._k_norm(k.float(), torch.float32), *angles[0])
        store(torch.cat([k.to(v.dtype), v], dim=-1), batch, memory)
        return q * self._dim**-0.5


class Lfm2ShortConv:
    """out(after * conv(before * value)), all three one projection of the input."""

    def __init__(self, config: Lfm2Config, loader: WeightLoader, prefix: str) -> None:
        hidden, taps = config.hidden_size, config.conv_L_cache
        self.topology = short_conv_topology(hidden, taps)
        self._in = loader.linear([f"{prefix}.in_proj"], [3 * hidden], hidden)
        self._out = loader.linear([f"{prefix}.out_proj"], [hidden], hidden)
        self._taps, _ = load_taps(loader, f"{prefix}.conv.weight", hidden, taps)
        self._bias = loader.optional_vector(f"{prefix}.conv.bias", hidden, torch.float32)

    @property
    def nbytes(self) -> int:
        return self._in.nbytes + self._out.nbytes + self._taps.nbytes

    def __call__(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """x: [T, C] in the compute dtype; returns the same."""
        mixed = self.remember(x, angles, batch, memory)
        return self._out(mixed.to(x.dtype), batch.num_small)

    def remember(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """Move the slots' windows on; return what was mixed, [T, C] float32."""
        before, after, value = self._in(x, batch.num_small).float().chunk(3, dim=-1)
        assert batch.state_slot is not None  # given to models that have state
        (window,) = memory.state
        inputs = before * value
        mixed = short_conv(inputs, self._taps, self._bias, window, batch.state_slot, batch.q_start)
        return after * mixed


class Lfm2Moe:
    """Experts chosen by a sigmoid router whose bias shifts the choice alone."""

    def __init__(self, config: Lfm2Experts, hidden: int, loader: WeightLoader, prefix: str) -> None:
        self._config = config
        count, inner = config.num_experts, config.moe_intermediate_size
        self._router = loader.tensor(f"{prefix}.gate.weight", (count, hidden))
        self._bias = torch.zeros(count, device=loader.device)
        if config.use_expert_bias:
            self._bias = loader.vector(f"{prefix}.expert_bias", count)
        self._experts = Experts(loader, prefix, count, hidden, inner, MLP_NAMES)

    @property
    def nbytes(self) -> int:
        return self._router.nbytes + self._experts.nbytes

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        """x: [T, C] in the compute dtype; returns [T, C] float32."""
        experts, weights = route_sigmoid(
            router_scores(x, self._router),
            self._bias,
            self._config.num_experts_per_tok,
            groups=1,
            top_groups=1,
            normalize=self._config.norm_topk_prob,
            scale=self._config.routed_scaling_factor,
            least_sum=LEAST_SUM,
        )
        return self._experts(x, experts, weights, num_small)


class Lfm2Block:
    """Implements `models.decoder.Block`."""

    def __init__(self, config: Lfm2Config, loader: WeightLoader, layer: int) -> None:
        prefix, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self._dtype = loader.dtype
        self._mixer_norm = RmsNorm(loader, f"{prefix}.operator_norm", hidden, eps)
        self._mlp_norm = RmsNorm(loader, f"{prefix}.ffn_norm", hidden, eps)
        if config.attends[layer]:
            self._mixer = Lfm2Attention(config, loader, f"{prefix}.self_attn")
        else:
            self._mixer = Lfm2ShortConv(config, loader, f"{prefix}.conv")
        self.topology = self._mixer.topology
        mlp, experts = f"{prefix}.feed_forward", config.experts
        if experts is not None and layer >= experts.num_dense_layers:
            self._mlp = Lfm2Moe(experts, hidden, loader, mlp)
        else:
            inner = config.intermediate_size
            self._mlp = GatedMlp(loader, mlp, hidden, inner, names=MLP_NAMES)

    @property
    def nbytes(self) -> int:
        return self._mixer.nbytes + self._mlp.nbytes

    def __call__(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        x = self._mixer_norm(hidden, self._dtype)
        hidden = hidden + self._mixer(x, angles, batch, memory)
        return hidden + self._mlp(self._mlp_norm(hidden, self._dtype), batch.num_small)

    def remember(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        return self._mixer.remember(self._mixer_norm(hidden, self._dtype), angles, batch, memory)


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Lfm2Config.from_dict(config)
    blocks = [Lfm2Block(settings, loader, layer) for layer in range(settings.num_hidden_layers)]
    norm = RmsNorm(loader, "model.embedding_norm", settings.hidden_size, settings.rms_norm_eps)
    return load_decoder(settings, loader, blocks, norm=norm)
