"""What single GGUF architectures say under keys of their own, or leave to the reader.

In: a metadata reader and the config so far. Out: fields in published spelling that are added to
it or stand in for what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from osaurus.bundle.gguf_metadata import MetadataReader
from osaurus.errors import UnsupportedBundle

#: Architectures that state the kv heads of each layer, 0 where it is no attention.
LAYERED_KV_HEADS = ("lfm2", "lfm2moe")
#: `expert_gating_func`: how a router's scores become weights.
_SOFTMAX, _SIGMOID = 1, 2


def feed_forward_length(read: MetadataReader) -> int:
    """A dense layer's inner width: of layers with experts it may be 0, or not be stated."""
    lengths = read.file.metadata.get(f"{read.prefix}.feed_forward_length")
    if isinstance(lengths, Sequence) and not isinstance(lengths, str):
        found = {length for length in lengths if length}
        if len(found) == 1:
            return int(found.pop())
    width = read.optional_integer("feed_forward_length")
    inner = width or read.optional_integer("expert_feed_forward_length")
    return inner or read.integer("feed_forward_length")


def norm_eps(read: MetadataReader) -> float:
    """Of RMS norms, or of those that subtract the mean."""
    plain = read.optional_number("attention.layer_norm_epsilon")
    if plain is not None and read.value("attention.layer_norm_rms_epsilon") is None:
        return plain
    return read.number("attention.layer_norm_rms_epsilon")


def refuse_what_families_lack(read: MetadataReader, config: Mapping[str, Any]) -> None:
    """What the tables of an architecture do not read would make other answers."""
    has_experts = any(config.get(name) for name in ("num_experts", "n_routed_experts"))
    if read.optional_integer("expert_count") and not has_experts:
        raise UnsupportedBundle(
            f"{read.file.path}: a mixture of experts in GGUF form is not supported for this "
            "architecture; use the model's safetensors form instead"
        )
    value_length = read.optional_integer("attention.value_length")
    if value_length not in (None, config["head_dim"]) and "v_head_dim" not in config:
        raise UnsupportedBundle(
            f"{read.file.path}: keys of {config['head_dim']} and values of {value_length} numbers "
            "in one head are not supported for this architecture"
        )


def _experts(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": read.integer("expert_count"),
        "num_experts_per_tok": read.integer("expert_used_count"),
        "moe_intermediate_size": read.integer("expert_feed_forward_length"),
    }


def _routing(read: MetadataReader) -> dict[str, Any]:
    """Experts behind a sigmoid router, beside some that every row asks."""
    gating = read.optional_integer("expert_gating_func")
    if gating not in (None, _SIGMOID):
        kind = "softmax" if gating == _SOFTMAX else str(gating)
        raise UnsupportedBundle(
            f"{read.file.path}: {read.prefix}.expert_gating_func {gating} ({kind}) is not "
            f"supported here, {_SIGMOID} (sigmoid) is; use the model's safetensors form instead"
        )
    return {
        "n_routed_experts": read.integer("expert_count"),
        "num_experts_per_tok": read.integer("expert_used_count"),
        "moe_intermediate_size": read.integer("expert_feed_forward_length"),
        "n_shared_experts": read.optional_integer("expert_shared_count") or 0,
        "first_k_dense_replace": read.optional_integer("leading_dense_block_count") or 0,
        "routed_scaling_factor": read.optional_number("expert_weights_scale") or 1.0,
        "norm_topk_prob": read.flag("expert_weights_norm", default=False),
        "n_group": read.optional_integer("expert_group_count") or 1,
        "topk_group": read.optional_integer("expert_group_used_count") or 1,
    }


def _deepseek2(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Newer files count one kv head, that of the latent, and give the lengths of the heads
    that it stands for under names of their own."""
    if read.optional_integer("expert_gating_func") is None:
        raise UnsupportedBundle(
            f"{read.file.path}: {read.prefix}.expert_gating_func is missing, as in DeepSeek-V2, "
            "whose router is not supported here; use the model's safetensors form instead"
        )
    rope = read.integer("rope.dimension_count")
    key = read.optional_integer("attention.key_length_mla") or read.integer("attention.key_length")
    value = read.optional_integer("attention.value_length_mla")
    return {
        **_routing(read),
        "head_dim": rope,
        "num_key_value_heads": config["num_attention_heads"],
        "partial_rotary_factor": None,
        "kv_lora_rank": read.integer("attention.kv_lora_rank"),
        "q_lora_rank": read.optional_integer("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value or read.integer("attention.value_length"),
        "rope_interleave": True,
    }


def _glm4_moe(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_routing(read), "use_qk_norm": "blk.0.attn_q_norm.weight" in read.file.tensors}


def _delta(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: a delta network's sizes lie under those of state spaces."""
    heads = read.integer("ssm.time_step_rank")
    found: dict[str, Any] = {
        "linear_conv_kernel_dim": read.integer("ssm.conv_kernel"),
        "linear_key_head_dim": read.integer("ssm.state_size"),
        "linear_num_key_heads": read.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": read.integer("ssm.inner_size") // heads,
        "full_attention_interval": read.optional_integer("full_attention_interval") or 4,
    }
    if read.optional_integer("expert_count"):
        shared = read.optional_integer("expert_shared_feed_forward_length")
        found |= _experts(read, config)
        found["shared_expert_intermediate_size"] = shared or found["moe_intermediate_size"]
    return found


def _lfm2(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's number of kv heads says what it is: none in a convolution."""
    layers = config["num_hidden_layers"]
    counts = read.each("attention.head_count_kv", layers)
    if counts is None or len({0, *counts}) != 2:
        raise UnsupportedBundle(
            f"{read.file.path}: {read.prefix}.attention.head_count_kv is not one number for each "
            f"of {layers} layers, 0 or the same"
        )
    return {
        "num_key_value_heads": max(counts),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_L_cache": read.integer("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
    }


def _lfm2_moe(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    routing = _routing(read)
    dense = routing["first_k_dense_replace"]
    return {
        **_lfm2(read, config),
        **_experts(read, config),
        "num_dense_layers": dense,
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in read.file.tensors,
        "routed_scaling_factor": routing["routed_scaling_factor"],
    }


#: Layers of the one published size whose attention is not scaled by its head size.
_GEMMA3_27B_LAYERS = 62


def _gemma3(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    """The format fixes the pattern of its layers and how queries are scaled."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    by_width = layers == _GEMMA3_27B_LAYERS
    found: dict[str, Any] = {
        "query_pre_attn_scalar": config["hidden_size"] // heads if by_width else config["head_dim"],
        "rope_local_base_freq": read.optional_number("rope.freq_base_swa") or 10000.0,
        **_pattern(read, 6),
    }
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if cap := read.optional_number(name):
            found[name] = cap
    return found


def _pattern(read: MetadataReader, default: int) -> dict[str, Any]:
    """Which layers have a window: each by name, or all but every so-manyth."""
    pattern = read.file.metadata.get(f"{read.prefix}.attention.sliding_window_pattern", default)
    if isinstance(pattern, Sequence):  # one truth value for each layer
        kinds = {True: "sliding_attention", False: "full_attention"}
        return {"layer_types": [kinds[bool(is_local)] for is_local in pattern]}
    return {"sliding_window_pattern": pattern}


def _cohere2(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    scale = read.optional_number("logit_scale")
    return {
        **_pattern(read, 4),
        "layer_norm_eps": config["rms_norm_eps"],
        **({} if scale is None else {"logit_scale": scale}),
    }


def _olmo2(read: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Files of OLMo 3 have the same name and windows beside."""
    if not config.get("sliding_window"):
        return {}
    return {"model_type": "olmo3", **_pattern(read, 4)}


#: Architecture -> what it adds to the config.
OF_FAMILY: Mapping[str, Callable[[MetadataReader, Mapping[str, Any]], dict[str, Any]]] = {
    "qwen3moe": _experts,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4_moe,
    "qwen3next": _delta,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "gemma3": _gemma3,
    "cohere2": _cohere2,
    "olmo2": _olmo2,
}
