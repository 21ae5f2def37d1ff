"""GGUF architectures as tables: a model type, tensor names, and what the format leaves unsaid.

Names are those of ggml's `tensor_mapping`; on their right those of the published checkpoints,
or MLX's where only that has a name for experts in one tensor of three axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EMBEDDING = {
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
#: An expert beside the routed ones that every row asks, by either family's name.
_SHARED = {
    f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")
}
_GATED_SHARED = {
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
#: Layers of experts in a model whose first layers are dense.
_ROUTED = {
    **{part: name for part, name in _EXPERTS.items() if part != "ffn_norm"},
    "exp_probs_b": "=mlp.gate.e_score_correction_bias",
}
_DENSE = {part: name for part, name in _MLP.items() if part != "ffn_norm"}
#: Layers after the last, which predict further tokens.
_DRAFT = {
    **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
#: Latent attention; keys and values of the latent as one matrix, or as two stacks of heads, of
#: which that of the keys is turned.
_LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
#: Three layers of four are gated delta networks; both kinds have the same norms.
_DELTA_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_DELTA_MIXERS = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    **_QK_NORM,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "=linear_attn.dt_bias",
    "ssm_a": "=linear_attn.decay",  # not its logarithm
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
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
_LFM2_NORMS = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
_LFM2_MLP = {
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    **{
        f"ffn_{name}_exps": f"feed_forward.switch_mlp.{name}_proj"
        for name in ("gate", "up", "down")
    },
    "exp_probs_b": "=feed_forward.expert_bias",
}
_LFM2_MODEL = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
#: The converter adds the one that the published norms leave out.
_DELTA_CONFIG: Mapping[str, object] = {"norms_include_one": True, "norm_topk_prob": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How one `general.architecture` maps to a published config and its tensor names.

    `rope_interleaved`: the converter permuted the rows of q and k so that a rotary pair lies
    side by side; the rows are left as they are and the config says so. `some_blocks` are parts
    that some layers have and others not. A name that begins with `=` is whole: it gets no suffix.
    """

    model_type: str
    rope_interleaved: bool
    block: Mapping[str, str]
    model: Mapping[str, str] = field(default_factory=lambda: EMBEDDING)
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
        block={**_LFM2_NORMS, **_LFM2_MLP},
        some_blocks={**_LFM2_CONVOLUTION, **_LFM2_ATTENTION},
        model=_LFM2_MODEL,
        # The stored width is the MLP's own.
        config={"block_auto_adjust_ff_dim": False},
    ),
    "lfm2moe": GgufArchitecture(
        model_type="lfm2_moe",
        rope_interleaved=False,
        block=_LFM2_NORMS,
        some_blocks={**_LFM2_CONVOLUTION, **_LFM2_ATTENTION, **_LFM2_MLP, **_LFM2_EXPERTS},
        model=_LFM2_MODEL,
    ),
    "deepseek2": GgufArchitecture(
        model_type="deepseek_v3",
        # Their rotary pairs lie side by side in the published weights too.
        rope_interleaved=True,
        block={
            "attn_norm": "input_layernorm",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
        },
        some_blocks={**_LATENT, **_DENSE, **_ROUTED, **_SHARED, **_DRAFT},
    ),
    "glm4": GgufArchitecture(
        model_type="glm4",
        rope_interleaved=True,
        block={
            **_ATTENTION,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": GgufArchitecture(
        model_type="glm4_moe",
        rope_interleaved=False,
        block={**_ATTENTION, "post_attention_norm": "post_attention_layernorm"},
        some_blocks={**_QK_NORM, **_DENSE, **_ROUTED, **_SHARED, **_DRAFT},
    ),
    "qwen3next": GgufArchitecture(
        model_type="qwen3_next",
        rope_interleaved=False,
        block=_DELTA_NORMS,
        some_blocks={**_DELTA_MIXERS, **_ROUTED, **_GATED_SHARED, **_DENSE},
        config=_DELTA_CONFIG,
    ),
    "qwen35": GgufArchitecture(
        model_type="qwen3_5_text",
        rope_interleaved=False,
        block={**_DELTA_NORMS, **_DENSE},
        some_blocks={**_DELTA_MIXERS, **_DRAFT},
        config={**_DELTA_CONFIG, "value_heads_tiled": True},
    ),
    "qwen35moe": GgufArchitecture(
        model_type="qwen3_5_moe_text",
        rope_interleaved=False,
        block=_DELTA_NORMS,
        some_blocks={**_DELTA_MIXERS, **_ROUTED, **_GATED_SHARED, **_DENSE, **_DRAFT},
        config={**_DELTA_CONFIG, "value_heads_tiled": True},
    ),
    "olmo2": GgufArchitecture(
        model_type="olmo2",
        rope_interleaved=False,
        block={
            **{part: name for part, name in _ATTENTION.items() if part != "attn_norm"},
            **_QK_NORM,
            **_DENSE,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "smollm3": GgufArchitecture(
        model_type="smollm3", rope_interleaved=True, block={**_ATTENTION, **_MLP}
    ),
    "ernie4_5": GgufArchitecture(
        model_type="ernie4_5", rope_interleaved=True, block={**_ATTENTION, **_MLP}
    ),
    "cohere2": GgufArchitecture(
        model_type="cohere2", rope_interleaved=True, block={**_ATTENTION, **_DENSE}
    ),
}
