"""Gemma 3, text (Gemma Team 2025, arXiv:2503.19786): local and global attention by turns.

Every sublayer is normed before and after, queries and keys are normed, norms keep their
weight's distance from one, and local layers turn by another rotary base than global ones.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.kernels.rope import RotaryTable, apply_rope, inverse_frequencies
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.decoder import Angles, DecoderModel
from osaurus.models.fields import head_counts, layer_windows, refuse, require_counts
from osaurus.models.layers import (
    NATIVE_ACTIVATIONS,
    GatedMlp,
    RmsNorm,
    activation_named,
    attend,
    load_head,
    store,
)
from osaurus.models.loading import WeightLoader
from osaurus.models.native_step import StepLayer, decoder_step
from osaurus.topology.base import AttentionTopology

#: What a published config leaves out when it has the family's usual value.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}
#: Layers from one global layer to the next, where the config does not list them.
PATTERN = 6
#: Rotary bases of the kinds of layer, in the order of the model's rotary tables.
THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config:
    """Published spellings. `ropes` are (theta, scaling) of global and local layers;
    `norms_include_one` says that the stored norm weights are whole, as in GGUF."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    query_pre_attn_scalar: float
    hidden_activation: str
    max_position_embeddings: int
    tie_word_embeddings: bool
    final_logit_softcapping: float | None
    norms_include_one: bool
    windows: tuple[int | None, ...]
    ropes: tuple[tuple[float, Mapping[str, Any] | None], ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Gemma3Config:
        """Takes a text config or the whole of a multimodal one. Raises `UnsupportedBundle`
        naming a field that cannot be served."""
        config = {**DEFAULTS, **(config.get("text_config") or config)}
        require_counts(config, [*DEFAULTS])
        refuse(config, "use_bidirectional_attention", [False, None])
        refuse(config, "attn_logit_softcapping", [None])
        heads, kv_heads = head_counts(config)
        cap = config.get("final_logit_softcapping")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=config["head_dim"],
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            query_pre_attn_scalar=float(config["query_pre_attn_scalar"]),
            hidden_activation=str(config.get("hidden_activation") or "gelu_pytorch_tanh"),
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
            final_logit_softcapping=float(cap) if cap else None,
            norms_include_one=bool(config.get("norms_include_one", False)),
            windows=layer_windows(config, int(config.get("sliding_window_pattern") or PATTERN)),
            ropes=_ropes(config),
        )


def _ropes(config: Mapping[str, Any]) -> tuple[tuple[float, Mapping[str, Any] | None], ...]:
    """transformers 5 keeps one mapping for each kind of layer; before, `rope_scaling` was of
    the global layers alone."""
    found: list[tuple[float, Mapping[str, Any] | None]] = []
    bases = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    for kind, default in THETAS.items():
        rope = dict((config.get("rope_parameters") or {}).get(kind) or {})
        if not rope and kind == "full_attention":
            rope = dict(config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or config.get(bases[kind]) or default
        found.append((float(theta), rope or None))
    return tuple(found)


class Gemma3Block:
    """Implements `models.decoder.Block`."""

    def __init__(
        self, config: Gemma3Config, loader: WeightLoader, prefix: str, window: int | None
    ) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim, self._dtype = dim, loader.dtype
        self._scale = config.query_pre_attn_scalar**-0.5
        self._rotary = 0 if window is None else 1
        self.topology = AttentionTopology(
            num_kv_heads=self._kv_heads, k_dim=dim, v_dim=dim, window=window
        )

        def norm(name: str, size: int) -> RmsNorm:
            add_one = not config.norms_include_one
            return RmsNorm(loader, f"{prefix}.{name}", size, config.rms_norm_eps, add_one)

        self._input_norm = norm("input_layernorm", hidden)
        self._post_attention_norm = norm("post_attention_layernorm", hidden)
        self._pre_mlp_norm = norm("pre_feedforward_layernorm", hidden)
        self._post_mlp_norm = norm("post_feedforward_layernorm", hidden)
        self._q_norm = norm("self_attn.q_norm", dim)
        self._k_norm = norm("self_attn.k_norm", dim)
        self._qkv = loader.linear(
            [f"{prefix}.self_attn.{name}_proj" for name in "qkv"],
            [self._heads * dim, self._kv_heads * dim, self._kv_heads * dim],
            hidden,
        )
        self._out = loader.linear([f"{prefix}.self_attn.o_proj"], [hidden], self._heads * dim)
        activation = activation_named(config.hidden_activation)
        self._mlp = GatedMlp(loader, f"{prefix}.mlp", hidden, config.intermediate_size, activation)

    @property
    def nbytes(self) -> int:
        return self._qkv.nbytes + self._out.nbytes + self._mlp.nbytes

    def describe(self) -> StepLayer:
        """The same layer for a native step."""
        return StepLayer(
            heads=self._heads,
            kv_heads=self._kv_heads,
            dim=self._dim,
            window=self.topology.window,
            rotary=self._rotary,
            scale=self._scale,
            eps=self._input_norm.eps,
            before_attention=self._input_norm.weight,
            qkv=self._qkv,
            q_norm=self._q_norm.weight,
            k_norm=self._k_norm.weight,
            out=self._out,
            after_attention=self._post_attention_norm.weight,
            before_mlp=self._pre_mlp_norm.weight,
            gate_up=self._mlp.gate_up,
            activation=NATIVE_ACTIVATIONS[self._mlp.activation],
            down=self._mlp.down,
            after_mlp=self._post_mlp_norm.weight,
        )

    def __call__(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        q = self.remember(hidden, angles, batch, memory)
        attended = attend(q, batch, memory, self._dim).flatten(1)
        out = self._out(attended, batch.num_small).float()
        hidden = hidden + self._post_attention_norm(out, torch.float32)
        out = self._mlp(self._pre_mlp_norm(hidden, self._dtype), batch.num_small).float()
        return hidden + self._post_mlp_norm(out, torch.float32)

    def remember(
        self, hidden: Tensor, angles: Angles, batch: ForwardBatch, memory: LayerMemory
    ) -> Tensor:
        """Put the rows' keys and values into their slots; return q [T, H, D] float32."""
        x = self._input_norm(hidden, self._dtype)
        heads = self._qkv(x, batch.num_small).view(x.shape[0], -1, self._dim)
        q, k, v = heads.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        cos, sin = angles[self._rotary]
        q = apply_rope(self._q_norm(q.float(), torch.float32), cos, sin)
        k = apply_rope(self._k_norm(k.float(), torch.float32), cos, sin)
        store(torch.cat([k.to(v.dtype), v], dim=-1), batch, memory)
        return q * self._scale


#: Where the text model lies: alone, and inside a multimodal bundle of either transformers.
_PREFIXES = ("model", "language_model.model", "model.language_model")


def load(config: Mapping[str, Any], loader: WeightLoader) -> DecoderModel:
    settings = Gemma3Config.from_dict(config)
    prefix = next((p for p in _PREFIXES if loader.has(f"{p}.embed_tokens.weight")), "model")
    embed_name = f"{prefix}.embed_tokens.weight"
    head_name = "language_model.lm_head.weight" if prefix == _PREFIXES[1] else "lm_head.weight"
    if prefix != "model":
        # The eyes of a multimodal bundle: this runtime serves its text.
        for part in ("vision_tower.", "multi_modal_projector."):
            loader.skip_under(part, f"model.{part}")
    shape = (settings.vocab_size, settings.hidden_size)
    embed = loader.embedding(embed_name, *shape)
    # Rounded to the weights' precision, as it was in training.
    scale = float(torch.tensor(settings.hidden_size**0.5).to(loader.dtype))
    cap = settings.final_logit_softcapping
    tables = [
        RotaryTable(
            *inverse_frequencies(
                settings.head_dim, theta, scaling, settings.max_position_embeddings
            ),
            loader.device,
        )
        for theta, scaling in settings.ropes
    ]
    blocks = [
        Gemma3Block(settings, loader, f"{prefix}.layers.{layer}", window)
        for layer, window in enumerate(settings.windows)
    ]
    norm = RmsNorm(
        loader,
        f"{prefix}.norm",
        settings.hidden_size,
        settings.rms_norm_eps,
        add_one=not settings.norms_include_one,
    )
    head = load_head(loader, embed, shape, settings.tie_word_embeddings, embed_name, head_name)
    return DecoderModel(
        loader,
        vocab_size=settings.vocab_size,
        max_context_tokens=settings.max_position_embeddings,
        embed=embed,
        blocks=blocks,
        norm=norm,
        head=head,
        rotary=tables,
        embed_scale=scale,
        step=decoder_step(
            [block.describe() for block in blocks],
            embed=embed,
            embed_scale=scale,
            norm=norm.weight,
            eps=norm.eps,
            head=head,
            rotary=tables,
        ),
        finish=None if cap is None else lambda logits: torch.tanh(logits / cap) * cap,
    )
