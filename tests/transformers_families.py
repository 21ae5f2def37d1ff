"""Small configs of every family that the transformers route is tested with, by name.

`MADE` has those that the route is tested with, `NAMED` other families that are native here: their
tests are in `parity/test_native_families.py`, `test_hybrid_families.py`, `test_llama_family.py`.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from osaurus.bundle.weights import SafetensorsSource
from osaurus.errors import BundleError
from osaurus.models import transformers_route
from osaurus.models.loading import ComputeMode
from tiny import BASE, save_tiny

_WINDOWS = [f"{kind}_attention" for kind in ("sliding", "full", "sliding")]
_SSM = dict(mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=16)
_MLA = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)

#: What people call it -> the config, its `family` being the `model_type`.
MADE: dict[str, dict[str, Any]] = {
    "Gemma 2": dict(
        family="gemma2",
        head_dim=32,
        query_pre_attn_scalar=20,
        sliding_window=24,
        layer_types=_WINDOWS,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "Gemma 3n": dict(
        family="gemma3n_text",
        num_hidden_layers=5,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        intermediate_size=[64] * 5,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0, 0.0],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=320,
        laurel_rank=8,
    ),
    "Gemma 4": dict(
        family="gemma4_text",
        num_hidden_layers=5,
        head_dim=16,
        global_head_dim=32,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=320,
    ),
    "MiniMax M2": dict(
        family="minimax_m2",
        head_dim=32,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=3,
        pad_token_id=0,
    ),
    "Kimi-Linear": dict(
        family="kimi_linear",
        num_key_value_heads=6,
        moe_intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        pad_token_id=0,
        **_MLA,
    ),
    "DeepSeek-V4": dict(
        family="deepseek_v4",
        num_key_value_heads=1,
        head_dim=32,
        q_lora_rank=32,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=16),
        sliding_window=16,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=16,
        # Fewer rows than these exist: among the many scores of zero that two heads give, the
        # choice of some would depend on how many there are, in transformers too.
        index_topk=64,
        hc_mult=2,
        pad_token_id=0,
    ),
    "ZAYA": dict(
        family="zaya",
        num_attention_heads=4,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=1,
        router_hidden_size=16,
        attention_bias=True,
    ),
    "Ling": dict(
        family="bailing_hybrid",
        num_key_value_heads=6,
        head_dim=16,
        moe_intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_mtp_layers=0,
        pad_token_id=0,
        **_MLA,
    ),
    "Nemotron-H": dict(
        family="nemotron_h",
        num_hidden_layers=4,
        layers_block_type=["mamba", "mlp", "attention", "moe"],
        head_dim=16,
        ssm_state_size=16,
        mamba_num_heads=12,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        n_routed_experts=4,
        pad_token_id=0,
    ),
    "Granite hybrid": dict(
        family="granitemoehybrid",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_heads=12,
        mamba_d_head=16,
        mamba_d_state=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        intermediate_size=32,
        logits_scaling=2.0,
        attention_multiplier=0.2,
        position_embedding_type="nope",
        **_SSM,
    ),
    "Falcon-H1": dict(
        family="falcon_h1",
        mamba_d_ssm=192,
        mamba_n_heads=12,
        mamba_d_head=16,
        mamba_d_state=16,
        head_dim=16,
        pad_token_id=0,
        **_SSM,
    ),
    "Mamba 2": dict(
        family="mamba2", num_heads=12, head_dim=16, state_size=16, n_groups=2, chunk_size=16
    ),
    "gpt-oss": dict(
        family="gpt_oss",
        head_dim=32,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        layer_types=_WINDOWS,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
    "Hunyuan dense": dict(family="hunyuan_v1_dense", head_dim=16),
    "Hunyuan MoE": dict(
        family="hunyuan_v1_moe", head_dim=16, intermediate_size=64, num_experts=4, moe_topk=2
    ),
    "Hy3": dict(
        family="hy_v3",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "Laguna": dict(
        family="laguna",
        head_dim=16,
        sliding_window=24,
        layer_types=_WINDOWS,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_attention_heads_per_layer=[4, 6, 4],
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters={
            f"{kind}_attention": dict(
                rope_type="default", rope_theta=theta, partial_rotary_factor=part
            )
            for kind, theta, part in (("full", 500000.0, 0.5), ("sliding", 10000.0, 1.0))
        },
    ),
    "Step": dict(
        family="step3p7",
        text_config=dict(
            **BASE,
            head_dim=16,
            moe_intermediate_size=32,
            share_expert_dim=32,
            n_routed_experts=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=24,
            layer_types=_WINDOWS,
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        vision_config=dict(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
        ),
    ),
    "Qwen3-Next": dict(
        family="qwen3_next",
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "Qwen3.5": dict(
        family="qwen3_5_text",
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "LFM2": dict(
        family="lfm2",
        layer_types=["conv", "full_attention", "conv"],
        block_ff_dim=96,
        pad_token_id=0,
    ),
    "Phi": dict(family="phi", pad_token_id=0),
    "OLMo 3": dict(family="olmo3", sliding_window=24, layer_types=_WINDOWS),
    "Phi-3": dict(family="phi3", pad_token_id=0, sliding_window=40),
    "Cohere 2": dict(
        family="cohere2", sliding_window=24, layer_types=_WINDOWS, logit_scale=0.25, pad_token_id=0
    ),
    "Ernie 4.5": dict(family="ernie4_5", head_dim=32, use_bias=True),
    "SmolLM3": dict(family="smollm3", no_rope_layers=[1, 0, 1], pad_token_id=0),
    "Llama": dict(family="llama"),
    "DeepSeek-V3": dict(
        family="deepseek_v3",
        num_key_value_heads=6,
        q_lora_rank=48,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        **_MLA,
    ),
    "Llama 4": dict(
        family="llama4_text",
        head_dim=16,
        attention_chunk_size=16,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size=64,
        intermediate_size_mlp=96,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        pad_token_id=0,
    ),
    "BLOOM": dict(family="bloom", n_layer=3, n_head=6, pad_token_id=0),
    "GPT-2": dict(family="gpt2", n_embd=96, n_layer=3, n_head=6, n_positions=512),
    "GPT-NeoX": dict(family="gpt_neox"),
    "Jamba": dict(
        family="jamba",
        num_experts=4,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
        pad_token_id=0,
    ),
}

#: Families with a file of their own here that the route is not tested with: name -> model types.
NAMED: dict[str, tuple[str, ...]] = {
    "Mistral": ("mistral",),
    "Qwen2": ("qwen2",),
    "Qwen3": ("qwen3",),
    "Qwen3 MoE": ("qwen3_moe",),
    "Gemma 3": ("gemma3", "gemma3_text"),
    "GLM-4": ("glm", "glm4"),
    "GLM-4.5": ("glm4_moe",),
    "Kimi K2": ("kimi_k2",),
    "OLMo 2": ("olmo2",),
}


def load_routed(folder: Path, mode: ComputeMode = "float32", **options: Any) -> Any:
    """The folder's model by the route, also where a family of ours would serve it."""
    config = json.loads((folder / "config.json").read_text())
    with closing(SafetensorsSource(folder)) as source:
        return transformers_route.build(config, source, mode, **options)


def outcome(folder: Path, name: str) -> str:
    """How the installed transformers and the route serve a family: a form, `refused: why`, or
    a form in float32 alone, `form; not in bfloat16: why`."""
    import transformers

    family = MADE[name]["family"]
    if family not in transformers.CONFIG_MAPPING:
        return f"refused: transformers does not define `{family}`"
    try:
        save_tiny(folder, **MADE[name])
        form = str(load_routed(folder).route)
    except BundleError as error:
        return f"refused: {error.message}"
    try:
        load_routed(folder, "bfloat16")
    except BundleError as error:
        return f"{form}; not in bfloat16: {error.message}"
    return form
