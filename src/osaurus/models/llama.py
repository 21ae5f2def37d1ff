"""Llama and the dense families that differ from it by flags: SmolLM2, Mistral, Qwen2, Qwen3.

Pre-norm blocks of grouped-query attention with rotary positions and a SiLU-gated MLP
(Touvron et al. 2023, arXiv:2302.13971; Jiang et al. 2023, arXiv:2310.06825). The flags are
biases and q/k norms (read off the tensors that exist), sliding windows, tied embeddings.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.coded_attention import coded_attention
from osaurus.kernels.norm import rms_norm
from osaurus.kernels.paged_attention import decode_attention, prefill_attention
from osaurus.kernels.rope import RotaryTable, apply_rope, inverse_frequencies
from osaurus.models.base import ForwardBatch, ForwardOutput, LayerMemory
from osaurus.models.loading import WeightLoader
from osaurus.models.native_step import StepLayer, decoder_step
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.linear import Embedding, Linear, fused_linear
from osaurus.topology.base import AttentionTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Published spellings. `windows[i]` is layer i's sliding window, None for full."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    rope_interleaved: bool
    rotary_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            if not isinstance(config.get(name), int):
                raise UnsupportedBundle(f"config.json: {name} is missing or not a whole number")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedBundle(f"config.json: hidden_act {config['hidden_act']!r}")
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            raise UnsupportedBundle(
                f"config.json: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        # transformers 5 moved rope settings into one mapping.
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            rope_scaling=rope or None,
            rope_interleaved=bool(config.get("rope_interleaved", False)),
            rotary_dim=int(head_dim * float(partial or 1.0)),
            max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            windows=_windows(config),
        )


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window. `layer_types` decides where it exists; else Qwen's
    `use_sliding_window` with `max_window_layers`; else Mistral's plain `sliding_window`."""
    layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    types = config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * layers
    if types:
        if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
            raise UnsupportedBundle(f"config.json: layer_types {sorted(set(types))}")
        return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
    full = int(config.get("max_window_layers") or 0) if "use_sliding_window" in config else 0
    return tuple(None if layer < full else int(window) for layer in range(layers))


class LlamaModel:
    """Implements `models.base.Model`."""

    reads_coded_kv = True

    def __init__(self, config: LlamaConfig, loader: WeightLoader) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_context_tokens = config.max_position_embeddings
        self.kv_dtype = loader.dtype
        self.device = loader.device
        self._embed: Embedding = loader.embedding(
            "model.embed_tokens.weight", config.vocab_size, config.hidden_size
        )
        self._layers = [_Block(config, loader, i) for i in range(config.num_hidden_layers)]
        self._norm = loader.vector("model.norm.weight", config.hidden_size)
        self._head = self._load_head(loader)
        frequencies, factor = inverse_frequencies(
            config.rotary_dim,
            config.rope_theta,
            config.rope_scaling,
            config.max_position_embeddings,
        )
        self._rotary = RotaryTable(frequencies, factor, loader.device)
        self._step = decoder_step(
            [
                layer.describe(window)
                for layer, window in zip(self._layers, config.windows, strict=True)
            ],
            embed=self._embed,
            norm=self._norm,
            eps=config.rms_norm_eps,
            head=self._head,
            rotary=[self._rotary],
        )

    def _load_head(self, loader: WeightLoader) -> Embedding:
        """The embedding serves as the head when the config ties them. A stored head of other
        values wins, as in transformers: somebody trained it."""
        name = "lm_head.weight"
        if self.config.tie_word_embeddings and (
            not loader.has(name) or loader.is_copy(name, "model.embed_tokens.weight")
        ):
            loader.skip(name)
            return self._embed
        return loader.embedding(name, self.config.vocab_size, self.config.hidden_size)

    @property
    def layers_topology(self) -> tuple[AttentionTopology, ...]:
        return tuple(
            AttentionTopology(
                num_kv_heads=self.config.num_key_value_heads,
                k_dim=self.config.head_dim,
                v_dim=self.config.head_dim,
                window=window,
            )
            for window in self.config.windows
        )

    @property
    def nbytes(self) -> int:
        own = self._embed.nbytes + sum(layer.nbytes for layer in self._layers)
        return own + (self._head.nbytes if self._head is not self._embed else 0)

    def reads_block_tables(self, kv: Sequence[LayerMemory], *, prefill: bool) -> bool:
        return self._step is not None and self._step.can_read(kv, prefill=prefill)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> ForwardOutput:
        if self._step is not None and not batch.groups:
            logits, tapped = self._step.run(batch, kv, sorted(batch.taps))
            return ForwardOutput(logits=logits, taps=tapped)
        hidden = batch.embeds if batch.embeds is not None else self._embed(batch.token_ids)
        cos, sin = self._rotary.at(batch.positions, batch.last_position)
        taps: dict[int, Tensor] = {}
        last = len(self._layers) - 1
        is_output_read = batch.logits_rows.numel() > 0 or max(batch.taps, default=-1) >= last
        for index, layer in enumerate(self._layers):
            if index == last and not is_output_read:
                # Prefill is after the keys and values only: nobody reads the last output.
                layer.write_kv(hidden, cos, sin, batch, kv[index])
                break
            hidden = layer(hidden, cos, sin, batch, kv[index])
            if index in batch.taps:
                taps[index] = hidden
        if last + 1 in batch.taps:
            taps[last + 1] = rms_norm(hidden, self._norm, self.config.rms_norm_eps, torch.float32)
        if batch.logits_rows.numel() == 0:
            return ForwardOutput(logits=None, taps=taps)
        rows = hidden.index_select(0, batch.logits_rows)
        normed = rms_norm(rows, self._norm, self.config.rms_norm_eps, torch.float32)
        return ForwardOutput(logits=self._head.logits(normed), taps=taps)


class _Block:
    """One layer. The residual stream is float32, products take the compute dtype."""

    def __init__(self, config: LlamaConfig, loader: WeightLoader, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden, dim = config.hidden_size, config.head_dim
        self._eps = config.rms_norm_eps
        self._dtype = loader.dtype
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = dim
        self._scale = dim**-0.5
        self._input_norm = loader.vector(f"{prefix}.input_layernorm.weight", hidden)
        self._post_norm = loader.vector(f"{prefix}.post_attention_layernorm.weight", hidden)
        self._qkv = _load_qkv(config, loader, f"{prefix}.self_attn")
        self._q_norm = self._k_norm = None
        if loader.has(f"{prefix}.self_attn.q_norm.weight"):
            self._q_norm = loader.vector(f"{prefix}.self_attn.q_norm.weight", dim)
            self._k_norm = loader.vector(f"{prefix}.self_attn.k_norm.weight", dim)
        self._out = loader.linear(
            [f"{prefix}.self_attn.o_proj"], [hidden], config.num_attention_heads * dim
        )
        inner = config.intermediate_size
        self._gate_up = loader.linear(
            [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], [inner, inner], hidden
        )
        self._down = loader.linear([f"{prefix}.mlp.down_proj"], [hidden], inner)
        # Some older Llama files store the frequencies that the config implies.
        loader.skip(f"{prefix}.self_attn.rotary_emb.inv_freq")

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._qkv, self._out, self._gate_up, self._down))

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, kv: LayerMemory
    ) -> Tensor:
        """hidden: [T, C] float32; returns the layer's output in the same form."""
        small = batch.num_small
        q = self.write_kv(hidden, cos, sin, batch, kv)
        hidden = hidden + self._out(self._attend(q, batch, kv), small)
        x = rms_norm(hidden, self._post_norm, self._eps, self._dtype)
        gate, up = self._gate_up(x, small).chunk(2, dim=-1)
        return hidden + self._down(F.silu(gate) * up, small)

    def describe(self, window: int | None) -> StepLayer:
        """The same layer for a native step."""
        return StepLayer(
            heads=self._heads,
            kv_heads=self._kv_heads,
            dim=self._dim,
            window=window,
            rotary=0,
            scale=self._scale,
            eps=self._eps,
            before_attention=self._input_norm,
            qkv=self._qkv,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            out=self._out,
            before_mlp=self._post_norm,
            gate_up=self._gate_up,
            activation="silu",
            down=self._down,
        )

    def write_kv(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, kv: LayerMemory
    ) -> Tensor:
        """Put the rows' keys and values into their slots; return q [T, H, D] float32."""
        rows, keys_from = hidden.shape[0], self._heads
        values_from = keys_from + self._kv_heads
        x = rms_norm(hidden, self._input_norm, self._eps, self._dtype)
        heads = self._qkv(x, batch.num_small).view(rows, values_from + self._kv_heads, self._dim)
        qk = heads[:, :values_from].float()
        if self._q_norm is not None and self._k_norm is not None:
            q = rms_norm(qk[:, :keys_from], self._q_norm, self._eps, torch.float32)
            k = rms_norm(qk[:, keys_from:], self._k_norm, self._eps, torch.float32)
            qk = torch.cat([q, k], dim=1)
        qk = apply_rope(qk, cos, sin)
        written = torch.cat([qk[:, keys_from:].to(heads.dtype), heads[:, values_from:]], dim=-1)
        flat = kv.storage.view(-1, kv.storage.shape[-1])
        flat.index_copy_(0, batch.groups[kv.group].write_rows, written.view(-1, flat.shape[1]))
        return qk[:, :keys_from] * self._scale

    def _attend(self, q: Tensor, batch: ForwardBatch, kv: LayerMemory) -> Tensor:
        """[T, H * D] in the compute dtype."""
        group = batch.groups[kv.group]
        if group.decode is not None:
            out = decode_attention(q, kv.storage, group.decode, self._dim).to(self._dtype)
        elif group.coded is not None and kv.coded is not None:
            out = coded_attention(q, kv.storage, kv.coded, group.coded, self._dim).to(self._dtype)
        elif group.prefill is not None:
            out = prefill_attention(q.to(self._dtype), kv.storage, group.prefill, self._dim)
        else:
            raise ValueError("a group batch carries a plan that its layers can follow")
        return out.reshape(q.shape[0], self._heads * self._dim)


def _load_qkv(config: LlamaConfig, loader: WeightLoader, prefix: str) -> Linear:
    """q, k and v as one layer. GGUF stores Llama's q and k rows for adjacent-pair rotary;
    they are put back into the half-split order that the kernels use."""
    dim = config.head_dim
    heads = [config.num_attention_heads] + [config.num_key_value_heads] * 2
    names = [f"{prefix}.{name}_proj" for name in "qkv"]
    sizes = [count * dim for count in heads]
    weights = [
        loader.matrix(f"{name}.weight", (size, config.hidden_size))
        for name, size in zip(names, sizes, strict=True)
    ]
    biases = loader.biases(names, sizes)
    if config.rope_interleaved:
        for i in (0, 1):  # q and k; values have no rotary
            rows = _half_split_rows(heads[i], dim)
            weight, bias = weights[i], biases[i]
            weights[i] = (
                weight.select_rows(rows) if isinstance(weight, GroupedWeight) else weight[rows]
            )
            biases[i] = None if bias is None else bias[rows]
    return fused_linear(weights, biases)


def _half_split_rows(heads: int, dim: int) -> Tensor:
    """Where each row of the half-split order lies among rows in adjacent-pair order."""
    order = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
    return (torch.arange(heads).unsqueeze(1) * dim + order).flatten()


def load(config: Mapping[str, Any], loader: WeightLoader) -> LlamaModel:
    return LlamaModel(LlamaConfig.from_dict(config), loader)
