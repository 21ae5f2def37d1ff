"""GGUF architectures we read: their tensor names in Hugging Face spelling, as tables.

In: a GGUF tensor name such as `blk.3.attn_q.weight`. Out: `model.layers.3.self_attn.q_proj.weight`.
A tensor that no table names is an error, never silently left out: a weight that is ignored is
a wrong answer later. Names are those of ggml's `tensor_mapping`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from osaurus.errors import UnsupportedBundle

_EMBEDDING = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
#: Gemma norms each sublayer before and after; `ffn_norm` is the one before the MLP.
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Experts of a layer in three axes; MLX's names for the same.
_EXPERTS = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
#: Phi stores q, k and v as one matrix, gate and up as another.
_PHI = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
#: LFM2: each layer has the parts of a convolution or those of attention.
_LFM2_CONVOLUTION = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_ATTENTION = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}

#: Not weights: rotary factors that `gguf_config.py` turns into `rope_scaling`.
ROPE_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How one `general.architecture` maps to a published config and its tensor names.

    `rope_interleaved`: the converter permuted the rows of q and k so that a rotary pair lies
    side by side; the rows are left as they are and the config says so. `some_blocks` are parts
    that some layers have and others not.
    """

    model_type: str
    rope_interleaved: bool
    block: Mapping[str, str]
    model: Mapping[str, str] = field(default_factory=lambda: _EMBEDDING)
    config: Mapping[str, object] = field(default_factory=dict)
    some_blocks: Mapping[str, str] = field(default_factory=dict)


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        model_type="llama", rope_interleaved=True, block={**_ATTENTION, **_MLP}
    ),
    "qwen2": GgufArchitecture(
        model_type="qwen2", rope_interleaved=False, block={**_ATTENTION, **_MLP}
    ),
    "qwen3": GgufArchitecture(
        model_type="qwen3", rope_interleaved=False, block={**_ATTENTION, **_QK_NORM, **_MLP}
    ),
    "qwen3moe": GgufArchitecture(
        model_type="qwen3_moe",
        rope_interleaved=False,
        block={**_ATTENTION, **_QK_NORM, **_EXPERTS},
        config={"norm_topk_prob": True},
    ),
    "phi3": GgufArchitecture(model_type="phi3", rope_interleaved=False, block=_PHI),
    "gemma3": GgufArchitecture(
        model_type="gemma3_text",
        rope_interleaved=False,
        block={**_ATTENTION, **_QK_NORM, **_MLP, **_GEMMA_NORMS},
        # The converter adds the one that the published norms leave out.
        config={"hidden_activation": "gelu_pytorch_tanh", "norms_include_one": True},
    ),
    "lfm2": GgufArchitecture(
        model_type="lfm2",
        rope_interleaved=False,
        block=_LFM2,
        some_blocks={**_LFM2_CONVOLUTION, **_LFM2_ATTENTION},
        model={
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",
            "output": "lm_head",
        },
        # The stored width is the MLP's own.
        config={"block_auto_adjust_ff_dim": False},
    ),
}


def find_architecture(name: object, where: object) -> GgufArchitecture:
    """The table entry, or `UnsupportedBundle` that lists what is supported."""
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedBundle(
            f"{where}: GGUF architecture {name!r} is not supported (supported: {known}); "
            "use the model's safetensors form instead"
        )
    return found


def hf_name(architecture: GgufArchitecture, name: str) -> str | None:
    """The Hugging Face name, None for rotary factors; raises `KeyError` for unknown names."""
    if name in ROPE_TENSORS:
        return None
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        raise KeyError(name)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        parts = architecture.some_blocks if part in architecture.some_blocks else architecture.block
        return f"model.layers.{int(layer)}.{parts[part]}.{suffix}"
    return f"{architecture.model[stem]}.{suffix}"


def missing_tensors(
    architecture: GgufArchitecture, num_layers: int, present: Iterable[str]
) -> list[str]:
    """GGUF names of weights that a whole model has and `present` lacks, in order.

    `output.weight` may be absent (tied to the embedding), and so may every bias. Parts that
    only some layers have are missed when their layer is loaded.
    """
    have = set(present)
    wanted = [f"{stem}.weight" for stem in architecture.model if stem != "output"]
    wanted += [
        f"blk.{layer}.{part}.weight" for layer in range(num_layers) for part in architecture.block
    ]
    return [name for name in wanted if name not in have]
