"""A GGUF's metadata as the config that the same model's `config.json` would hold.

In: an open `GgufFile`. Out: a plain dict in published Hugging Face spelling. A value that the
format does not carry is left out, never guessed; one that no config can express is an error.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from osaurus.bundle.gguf_families import (
    LAYERED_KV_HEADS,
    OF_FAMILY,
    feed_forward_length,
    norm_eps,
    refuse_what_families_lack,
)
from osaurus.bundle.gguf_metadata import MetadataReader, shortest_decimal
from osaurus.bundle.gguf_names import find_architecture
from osaurus.bundle.gguf_reader import GgufFile
from osaurus.bundle.gguf_tables import GgufArchitecture
from osaurus.errors import IncompleteBundle, UnsupportedBundle


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The published config. Raises `UnsupportedBundle` for an unknown architecture."""
    name = file.metadata.get("general.architecture")
    architecture = find_architecture(name, file.path)
    read = MetadataReader(file, str(name))
    hidden_size = read.integer("embedding_length")
    num_heads = read.integer("attention.head_count")
    drafts = read.optional_integer("nextn_predict_layers") or 0
    num_layers = read.integer("block_count") - drafts
    head_dim = read.optional_integer("attention.key_length") or hidden_size // num_heads
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": feed_forward_length(read),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": norm_eps(read),
        "rope_theta": read.optional_number("rope.freq_base") or 10000.0,
        "max_position_embeddings": read.integer("context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_interleaved": architecture.rope_interleaved,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **architecture.config,
    }
    if drafts:
        config["num_nextn_predict_layers"] = drafts
    if name not in LAYERED_KV_HEADS and (
        kv_heads := read.optional_integer("attention.head_count_kv")
    ):
        config["num_key_value_heads"] = kv_heads
    if window := read.optional_integer("attention.sliding_window"):
        config["sliding_window"] = window
    rotary = read.optional_integer("rope.dimension_count") or head_dim
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if scaling := _rope_scaling(file, read, config):
        config["rope_scaling"] = scaling
    if (of_family := OF_FAMILY.get(str(name))) is not None:
        config |= of_family(read, config)
    refuse_what_families_lack(read, config)
    for key, target in (
        ("bos", "bos_token_id"),
        ("eos", "eos_token_id"),
        ("padding", "pad_token_id"),
    ):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int):
            config[target] = token
    return config


def gguf_architecture(file: GgufFile) -> GgufArchitecture:
    return find_architecture(file.metadata.get("general.architecture"), file.path)


#: Sampling advice that newer converters store -> its name in generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """What `generation_config.json` would hold: end ids and sampling advice, if any."""
    found: dict[str, Any] = {}
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    if isinstance(eos, int):
        found["eos_token_id"] = eos
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, float) and math.isfinite(value):
            found[name] = shortest_decimal(value)
        elif type(value) is int:
            found[name] = value
    return found


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: padding included, which the token list may not have."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.dims) == 2:
        return embedding.dims[1]
    return len(file.metadata.get("tokenizer.ggml.tokens", ()))


def _rope_scaling(
    file: GgufFile, read: MetadataReader, config: dict[str, Any]
) -> dict[str, Any] | None:
    if "rope_factors_long.weight" in file.tensors:
        raise UnsupportedBundle(
            f"{file.path}: rope scaling 'longrope' (rope_factors_long.weight) is not supported"
        )
    kind = read.value("rope.scaling.type")
    factor = read.optional_number("rope.scaling.factor")
    if kind in (None, "none"):
        return _llama3_scaling(file, config)
    if kind not in ("linear", "yarn"):
        raise UnsupportedBundle(f"{file.path}: rope scaling {kind!r} is not supported")
    if factor is None:
        raise IncompleteBundle(f"{file.path}: rope scaling {kind!r} without its factor")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if log_multiplier := read.optional_number("rope.scaling.yarn_log_multiplier"):
        scaling["mscale"] = scaling["mscale_all_dim"] = shortest_decimal(10 * log_multiplier)
    if original := read.optional_integer("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    for key, target in (
        ("rope.scaling.attn_factor", "attention_factor"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if (value := read.optional_number(key)) is not None:
            scaling[target] = value
    return scaling


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """Llama 3's rotary scaling, which GGUF carries as one divisor for each frequency.

    The published parameters are found again by computing the divisors from them: every model
    of that family uses low 1, high 4 and 8192 original positions; the factor is the largest
    divisor. A file whose divisors are others is refused rather than approximated.
    """
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type.name != "F32":
        raise UnsupportedBundle(f"{file.path}: rope_freqs.weight is {tensor.type.name}, not F32")
    stored = struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor))
    if all(value == 1.0 for value in stored):
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": float(f"{max(stored):.6g}"),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(config["rope_theta"], 2 * len(stored), scaling)
    if any(abs(a - b) > 1e-3 * b for a, b in zip(stored, expected, strict=True)):
        raise UnsupportedBundle(
            f"{file.path}: rope_freqs.weight holds rotary divisors of an unknown kind"
        )
    return scaling


def _llama3_divisors(theta: float, rotary_dim: int, scaling: dict[str, Any]) -> list[float]:
    """Divisor of each rotary frequency, as published with Llama 3.1."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for pair in range(rotary_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / rotary_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
