"""Qwen3-Next and the text of Qwen3.5, dense and with experts (Qwen Team 2025).

Three layers of four are gated delta networks (arXiv:2412.06464), the fourth is attention whose
answer passes a gate and of whose heads a quarter turns. Norms keep their weight's distance from
one. Experts stand beside a shared one that has a gate of its own. Qwen3.5 stores the delta
network's projections apart, Qwen3-Next a key head after another.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden, E experts; in delta layers H
value heads, K key heads, Dk and Dv their dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.elementwise import sigmoid, silu, softplus
from osaurus.kernels.gated_delta import DeltaRows, DeltaState, gated_delta, waiting_shape
from osaurus.kernels.moe import route_softmax, router_scores
from osaurus.kernels.norm import rms_norm
from osaurus.kernels.rope import apply_rope
from osaurus.kernels.short_conv import short_conv
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.decoder import Angles, DecoderModel, load_decoder
from osaurus.models.experts import Experts
from osaurus.models.fields import DecoderConfig, common_fields, require_counts
from osaurus.models.layers import (
    GatedMlp,
    RmsNorm,
    attend,
    load_reordered,
    load_taps,
    skip_draft_layers,
    store,
)
from osaurus.models.loading import WeightLoader
from osaurus.quant.linear import Linear, ReorderedLinear
from osaurus.topology.base import AttentionTopology
from osaurus.topology.recurrent import gated_delta as gated_delta_topology

#: What published configs may leave out.
DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
#: Kept from the length of a query or key, so that zeros stay zeros.
UNIT_EPS = 1e-6
#: Where the text model and its head lie: alone, and inside a multimodal bundle.
_PLACES = (
    ("model", "lm_head"),
    ("model.language_model", "lm_head"),
    ("language_model.model", "language_model.lm_head"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Published spellings less `linear_`."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """What is convolved: queries, keys, values."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(DecoderConfig):
    """Published spellings. `attends[i]` says that layer i is attention, `sparse[i]` that it has
    experts (whose fields are 0 in a dense model). The last two say how a GGUF spells norms and
    orders value heads."""

    attends: tuple[bool, ...]
    sparse: tuple[bool, ...]
    delta: DeltaConfig
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    norms_include_one: bool
    value_heads_tiled: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3NextConfig:
        """Takes a text config or the whole of a multimodal one. Raises `UnsupportedBundle`
        naming a field that is missing or cannot be served."""
        text = dict(config.get("text_config") or config)
        tied = text.get("tie_word_embeddings") or config.get("tie_word_embeddings")
        config = {**DEFAULTS, **{name: value for name, value in text.items() if value is not None}}
        config["tie_word_embeddings"] = bool(tied)
        require_counts(config, ["num_hidden_layers", *DEFAULTS.keys() - {"partial_rotary_factor"}])
        sparse = _sparse(config)
        if any(sparse):
            require_counts(config, ["num_experts_per_tok", *EXPERT_WIDTHS])
        if all(sparse):  # no layer has a width of its own
            config.setdefault("intermediate_size", config["moe_intermediate_size"])
        delta = DeltaConfig(
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_head_dim=config["linear_key_head_dim"],
            value_head_dim=config["linear_value_head_dim"],
            conv_kernel_dim=config["linear_conv_kernel_dim"],
        )
        if delta.num_value_heads % delta.num_key_heads:
            raise UnsupportedBundle(
                f"config.json: linear_num_value_heads {delta.num_value_heads} is no multiple of "
                f"linear_num_key_heads {delta.num_key_heads}"
            )
        return cls(
            **common_fields(config, {}),
            attends=_attends(config),
            sparse=sparse,
            delta=delta,
            num_experts=int(config.get("num_experts", 0)),
            num_experts_per_tok=int(config.get("num_experts_per_tok", 0)),
            moe_intermediate_size=int(config.get("moe_intermediate_size", 0)),
            shared_expert_intermediate_size=int(config.get("shared_expert_intermediate_size", 0)),
            norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            norms_include_one=bool(config.get("norms_include_one", False)),
            value_heads_tiled=bool(config.get("value_heads_tiled", False)),
        )


def _sparse(config: Mapping[str, Any]) -> tuple[bool, ...]:
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers", ())
    return tuple(
        bool(config.get("num_experts")) and layer not in dense and (layer + 1) % step == 0
        for layer in range(config["num_hidden_layers"])
    )


def _attends(config: Mapping[str, Any]) -> tuple[bool, ...]:
    layers, interval = config["num_hidden_layers"], config["full_attention_interval"]
    types = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(layers)
    ]
    if len(types) != layers or set(types) - {"linear_attention", "full_attention"}:
        raise UnsupportedBundle(f"config.json: layer_types {sorted(set(types))} of {len(types)}")
    return tuple(kind == "full_attention" for kind in types)


class GatedAttention:
    """Grouped-query attention; each number of its answer passes a gate of the same input."""

    def __init__(
        self, config: Qwen3NextConfig, loader: WeightLoader, prefix: str, add_one: bool
    ) -> None:
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = dim
        self.topology = AttentionTopology(num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim)
        self._q_norm = RmsNorm(loader, f"{prefix}.q_norm", dim, eps, add_one)
        self._k_norm = RmsNorm(loader, f"{prefix}.k_norm", dim, eps, add_one)
        # A head's queries and gates lie one after the other: all queries, then all gates.
        stored = torch.arange(2 * self._heads * dim).view(self._heads, 2, dim)
        self._in = load_reordered(
            loader,
            [f"{prefix}.{name}_proj" for name in "qkv"],
            [stored.transpose(0, 1).flatten(), None, None],
            [2 * self._heads * dim, self._kv_heads * dim, self._kv_heads * dim],
            hidden,
        )
        self._out = loader.linear([f"{prefix}.o_proj"], [hidden], self._heads * dim)

    @property
    def nbytes(self) -> int:
        return self._in.nbytes + self._out.nbytes

    def __call__(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """x: [T, C] in the compute dtype; returns the same."""
        q, gate = self.remember(x, angles, batch, memory)
        attended = attend(q, batch, memory, self._dim).float() * sigmoid(gate.float())
        return self._out(attended.flatten(1).to(x.dtype), batch.num_small)

    def remember(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> tuple[Tensor, Tensor]:
        """Put the rows' keys and values into their slots; return q float32 and the gates before
        their sigmoid, both [T, H, D]."""
        parts = self._in(x, batch.num_small).view(x.shape[0], -1, self._dim)
        heads, kv_heads = self._heads, self._kv_heads
        q, gate, k, v = parts.split([heads, heads, kv_heads, kv_heads], dim=1)
        q = apply_rope(self._q_norm(q.float(), torch.float32), *angles[0])
        k = apply_rope(self._k_norm(k.float(), torch.float32), *angles[0])
        store(torch.cat([k.to(v.dtype), v], dim=-1), batch, memory)
        return q * self._dim**-0.5, gate


class GatedDeltaNet:
    """Queries, keys and values convolved, then the gated delta rule, then a norm and a gate."""

    def __init__(
        self, config: Qwen3NextConfig, loader: WeightLoader, prefix: str, taps: Tensor
    ) -> None:
        self._config = delta = config.delta
        key_heads, heads = delta.num_key_heads, delta.num_value_heads
        dims = (delta.key_head_dim, delta.value_head_dim)
        waiting = waiting_shape(key_heads, heads, *dims)
        self.topology = gated_delta_topology(
            delta.channels, delta.conv_kernel_dim, heads, *dims, waiting
        )
        self._taps, self._eps = taps, config.rms_norm_eps
        self._in = _load_delta_inputs(config, loader, prefix)
        out = loader.linear([f"{prefix}.out_proj"], [config.hidden_size], delta.value_size)
        self._norm = loader.vector(f"{prefix}.norm.weight", delta.value_head_dim)
        if loader.has(f"{prefix}.decay"):
            self._decay = loader.vector(f"{prefix}.decay", heads)
        else:
            self._decay = -loader.vector(f"{prefix}.A_log", heads).exp()
        self._step_bias = loader.vector(f"{prefix}.dt_bias", heads)
        if config.value_heads_tiled:
            order = _tiled_heads(delta).to(loader.device)
            self._decay, self._step_bias = self._decay[order], self._step_bias[order]
            # Its columns are in the stored order of heads, which its input is brought to.
            columns = _rows_of(order.argsort(), delta.value_head_dim)
            out = ReorderedLinear(out, columns)
        self._out: Linear = out

    @property
    def nbytes(self) -> int:
        return self._in.nbytes + self._out.nbytes + self._taps.nbytes

    def __call__(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """x: [T, C] in the compute dtype; returns the same."""
        answers, gate = self.remember(x, angles, batch, memory)
        out = rms_norm(answers, self._norm, self._eps, torch.float32) * silu(gate)
        return self._out(out.flatten(1).to(x.dtype), batch.num_small)

    def remember(
        self, x: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> tuple[Tensor, Tensor]:
        """Let the slots' state absorb the rows; return the rule's answers and the gates before
        their SiLU, both [T, H, Dv] float32."""
        delta = self._config
        heads, k_dim = delta.num_value_heads, delta.key_head_dim
        window, matrix, waiting, num_waiting = memory.state
        assert batch.state_slot is not None  # given to models that have state
        inputs = self._in(x, batch.num_small).float()
        mixed, gate, rate, step = inputs.split([delta.channels, delta.value_size, heads, heads], -1)
        mixed = short_conv(mixed, self._taps, None, window, batch.state_slot, batch.q_start)
        q, k, v = silu(mixed).split([delta.key_size, delta.key_size, delta.value_size], dim=-1)
        rows = DeltaRows(
            q=_unit(q.unflatten(-1, (-1, k_dim))) * k_dim**-0.5,
            k=_unit(k.unflatten(-1, (-1, k_dim))),
            v=v.unflatten(-1, (heads, -1)),
            log_decay=self._decay * softplus(step + self._step_bias),
            rate=sigmoid(rate),
        )
        state = DeltaState(matrix=matrix, waiting=waiting, num_waiting=num_waiting)
        answers = gated_delta(rows, state, batch.state_slot, batch.q_start, batch.num_small)
        return answers, gate.unflatten(-1, (heads, -1))


def _unit(x: Tensor) -> Tensor:
    """x over its length along the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def _load_delta_inputs(config: Qwen3NextConfig, loader: WeightLoader, prefix: str) -> Linear:
    """Queries, keys, values, gates, rates and steps as one layer, each part in its heads'
    order."""
    delta, hidden = config.delta, config.hidden_size
    heads, value_size = delta.num_value_heads, delta.value_size
    key_heads, k_dim, group = delta.num_key_heads, delta.key_head_dim, heads // delta.num_key_heads
    qkv = z = rates = None  # orders of rows
    if config.value_heads_tiled:
        rates = _tiled_heads(delta)
        z = _rows_of(rates, delta.value_head_dim)
        qkv = _channel_order(delta)
    if loader.has(f"{prefix}.in_proj_qkvz.weight"):
        widths = [k_dim, k_dim, group * delta.value_head_dim, group * delta.value_head_dim]
        parts = {"qkvz": (_by_part(key_heads, widths), delta.channels + value_size)}
    else:
        parts = {"qkv": (qkv, delta.channels), "z": (z, value_size)}
    if loader.has(f"{prefix}.in_proj_ba.weight"):
        parts["ba"] = (_by_part(key_heads, [group, group]), 2 * heads)
    else:
        parts |= {"b": (rates, heads), "a": (rates, heads)}
    names = [f"{prefix}.in_proj_{part}" for part in parts]
    orders, sizes = zip(*parts.values(), strict=True)
    return load_reordered(loader, names, orders, sizes, hidden)


def _tiled_heads(delta: DeltaConfig) -> Tensor:
    """Where value head h is stored when the first of each key head come first, then the second
    of each: a GGUF's order, for the kernels' of all of one key head and then the next."""
    stored = torch.arange(delta.num_value_heads).view(-1, delta.num_key_heads)
    return stored.t().flatten()


def _rows_of(heads: Tensor, width: int) -> Tensor:
    """The rows of heads of `width` rows each."""
    return (heads.unsqueeze(1) * width + torch.arange(width, device=heads.device)).flatten()


def _channel_order(delta: DeltaConfig) -> Tensor:
    """The same for what is convolved, of which queries and keys stay."""
    values = 2 * delta.key_size + _rows_of(_tiled_heads(delta), delta.value_head_dim)
    return torch.cat([torch.arange(2 * delta.key_size), values])


def _by_part(heads: int, widths: list[int]) -> Tensor:
    """Where the rows of each part lie when a head's parts, `widths` rows each, follow one
    another: the first part of all heads, then the second."""
    stored = torch.arange(heads * sum(widths)).view(heads, -1)
    return torch.cat([part.flatten() for part in stored.split(widths, dim=1)])


class Qwen3NextMoe:
    """Experts behind a softmax router, and one that every row asks as far as its gate opens."""

    def __init__(self, config: Qwen3NextConfig, loader: WeightLoader, prefix: str) -> None:
        count, hidden = config.num_experts, config.hidden_size
        self._top_k, self._normalize = config.num_experts_per_tok, config.norm_topk_prob
        self._router = loader.tensor(f"{prefix}.gate.weight", (count, hidden))
        self._experts = Experts(loader, prefix, count, hidden, config.moe_intermediate_size)
        shared = config.shared_expert_intermediate_size
        self._shared = GatedMlp(loader, f"{prefix}.shared_expert", hidden, shared)
        self._shared_gate = _load_row(loader, f"{prefix}.shared_expert_gate.weight", hidden)

    @property
    def nbytes(self) -> int:
        return self._router.nbytes + self._experts.nbytes + self._shared.nbytes

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        """x: [T, C] in the compute dtype; returns [T, C] float32."""
        scores = router_scores(x, self._router)
        experts, weights = route_softmax(scores, self._top_k, self._normalize)
        opening = sigmoid((x.float() * self._shared_gate).sum(-1, keepdim=True))
        chosen = self._experts(x, experts, weights, num_small)
        return chosen + opening * self._shared(x, num_small)


def _load_row(loader: WeightLoader, name: str, size: int) -> Tensor:
    """A matrix of one row [1, size] float32; a GGUF may keep it as a vector."""
    try:
        return loader.tensor(name, (1, size))
    except UnsupportedBundle as error:
        try:
            return loader.vector(name, size).unsqueeze(0)
        except UnsupportedBundle:
            raise error from None


class Qwen3NextBlock:
    """Implements `models.decoder.Block`. `taps` are those of a delta layer's convolution."""

    def __init__(
        self,
        config: Qwen3NextConfig,
        loader: WeightLoader,
        prefix: str,
        layer: int,
        taps: Tensor | None,
        add_one: bool,
    ) -> None:
        prefix, hidden, eps = f"{prefix}.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self._dtype = loader.dtype
        self._input_norm = RmsNorm(loader, f"{prefix}.input_layernorm", hidden, eps, add_one)
        self._post_norm = RmsNorm(
            loader, f"{prefix}.post_attention_layernorm", hidden, eps, add_one
        )
        if taps is None:
            self._mixer = GatedAttention(config, loader, f"{prefix}.self_attn", add_one)
        else:
            self._mixer = GatedDeltaNet(config, loader, f"{prefix}.linear_attn", taps)
        self.topology = self._mixer.topology
        if config.sparse[layer]:
            self._mlp = Qwen3NextMoe(config, loader, f"{prefix}.mlp")
        else:
            self._mlp = GatedMlp(loader, f"{prefix}.mlp", hidden, config.intermediate_size)

    @property
    def nbytes(self) -> int:
        return self._mixer.nbytes + self._mlp.nbytes

    def __call__(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        x = self._input_norm(hidden, self._dtype)
        hidden = hidden + self._mixer(x, angles, batch, memory)
        return hidden + self._mlp(self._post_norm(hidden, self._dtype), batch.num_small)

    def remember(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> object:
        return self._mixer.remember(self._input_norm(hidden, self._dtype), angles, batch, memory)


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Qwen3NextConfig.from_dict(config)
    prefix, head = next(
        (place for place in _PLACES if loader.has(f"{place[0]}.embed_tokens.weight")), _PLACES[0]
    )
    loader.skip_under("model.visual.", "vision_tower.")  # the eyes
    skip_draft_layers(loader, config)
    delta = settings.delta
    convolutions = [
        None
        if attends
        else load_taps(
            loader,
            f"{prefix}.layers.{layer}.linear_attn.conv1d.weight",
            delta.channels,
            delta.conv_kernel_dim,
        )
        for layer, attends in enumerate(settings.attends)
    ]
    # MLX's converter lays convolutions out its own way and adds the one to norms.
    add_one = not any(found is not None and found[1] for found in convolutions)
    add_one = add_one and not settings.norms_include_one
    if settings.value_heads_tiled:
        order = _channel_order(delta).to(loader.device)
        convolutions = [found and (found[0][order], found[1]) for found in convolutions]
    blocks = [
        Qwen3NextBlock(settings, loader, prefix, layer, found[0] if found else None, add_one)
        for layer, found in enumerate(convolutions)
    ]
    hidden, eps = settings.hidden_size, settings.rms_norm_eps
    norm = RmsNorm(loader, f"{prefix}.norm", hidden, eps, add_one)
    return load_decoder(settings, loader, blocks, norm=norm, prefix=prefix, head=head)
