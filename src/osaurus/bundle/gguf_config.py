"""A GGUF's metadata as the config that the same model's `config.json` would hold.

In: an open `GgufFile`. Out: a plain dict in published Hugging Face spelling. A value that the
format does not carry is left out, never guessed; one that no config can express is an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from osaurus.bundle.gguf_names import GgufArchitecture, find_architecture
from osaurus.bundle.gguf_reader import GgufFile
from osaurus.errors import BundleError, IncompleteBundle, UnsupportedBundle


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The published config. Raises `UnsupportedBundle` for an unknown architecture."""
    name = file.metadata.get("general.architecture")
    architecture = find_architecture(name, file.path)
    read = _Reader(file, str(name))
    hidden_size = read.integer("embedding_length")
    num_heads = read.integer("attention.head_count")
    head_dim = read.optional_integer("attention.key_length") or hidden_size // num_heads
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.optional_number("rope.freq_base") or 10000.0,
        "max_position_embeddings": read.integer("context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_interleaved": architecture.rope_interleaved,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **architecture.config,
    }
    if name == "lfm2":
        config |= _lfm2(read, config)
    elif kv_heads := read.optional_integer("attention.head_count_kv"):
        config["num_key_value_heads"] = kv_heads
    _refuse_what_we_lack(read, config)
    if window := read.optional_integer("attention.sliding_window"):
        config["sliding_window"] = window
    if scaling := _rope_scaling(file, read, config):
        config["rope_scaling"] = scaling
    if name == "gemma3":
        config |= _gemma3(read, config)
    if name == "qwen3moe":
        config |= _experts(read)
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
            found[name] = _shortest(value)
        elif type(value) is int:
            found[name] = value
    return found


class _Reader:
    """Reads `{architecture}.{key}`; numbers that must be there are asked for by name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = architecture

    def value(self, key: str) -> Any:
        """A scalar; an array with one value for each layer counts when all are equal."""
        value = self.file.metadata.get(f"{self.prefix}.{key}")
        if isinstance(value, Sequence) and not isinstance(value, str):
            distinct = set(value)
            if len(distinct) != 1:
                raise UnsupportedBundle(
                    f"{self.file.path}: {self.prefix}.{key} differs between layers "
                    f"({sorted(distinct)}), which this architecture does not support"
                )
            return distinct.pop()
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BundleError(f"{self.file.path}: {self.prefix}.{key} is {value!r}, not a count")
        return value

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if not value:
            raise IncompleteBundle(
                f"{self.file.path}: the metadata lacks {self.prefix}.{key}; the file is not a "
                "whole model"
            )
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BundleError(f"{self.file.path}: {self.prefix}.{key} is {value!r}, not a number")
        if not math.isfinite(value):
            raise BundleError(f"{self.file.path}: {self.prefix}.{key} is {value}")
        return _shortest(value)

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise IncompleteBundle(
                f"{self.file.path}: the metadata lacks {self.prefix}.{key}; the file is not a "
                "whole model"
            )
        return value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06.

    The converter rounded the published value to float32; this gives the published one back.
    """
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: padding included, which the token list may not have."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.dims) == 2:
        return embedding.dims[1]
    return len(file.metadata.get("tokenizer.ggml.tokens", ()))


#: Model types whose experts are read from a GGUF.
_WITH_EXPERTS = ("qwen3_moe",)


def _refuse_what_we_lack(read: _Reader, config: dict[str, Any]) -> None:
    if read.optional_integer("expert_count") and config["model_type"] not in _WITH_EXPERTS:
        raise UnsupportedBundle(
            f"{read.file.path}: a mixture of experts in GGUF form is not supported for this "
            "architecture; use the model's safetensors form instead"
        )
    rotary = read.optional_integer("rope.dimension_count") or config["head_dim"]
    if rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / config["head_dim"]
    value_length = read.optional_integer("attention.value_length")
    if value_length not in (None, config["head_dim"]):
        raise UnsupportedBundle(
            f"{read.file.path}: keys of {config['head_dim']} and values of {value_length} numbers "
            "in one head are not supported for this architecture"
        )


def _experts(read: _Reader) -> dict[str, Any]:
    return {
        "num_experts": read.integer("expert_count"),
        "num_experts_per_tok": read.integer("expert_used_count"),
        "moe_intermediate_size": read.integer("expert_feed_forward_length"),
    }


def _lfm2(read: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    """A layer's number of kv heads says what it is: none in a convolution."""
    counts = read.file.metadata.get(f"{read.prefix}.attention.head_count_kv")
    layers = config["num_hidden_layers"]
    if not isinstance(counts, Sequence) or len(counts) != layers or len({0, *counts}) != 2:
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


#: Layers of the one published size whose attention is not scaled by its head size.
_GEMMA3_27B_LAYERS = 62


def _gemma3(read: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3's metadata says under names of its own, or leaves to the reader: the
    format fixes the pattern of its layers and how queries are scaled."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    by_width = layers == _GEMMA3_27B_LAYERS
    found: dict[str, Any] = {
        "query_pre_attn_scalar": config["hidden_size"] // heads if by_width else config["head_dim"],
        "rope_local_base_freq": read.optional_number("rope.freq_base_swa") or 10000.0,
    }
    pattern = read.file.metadata.get(f"{read.prefix}.attention.sliding_window_pattern", 6)
    if isinstance(pattern, Sequence):  # one truth value for each layer
        kinds = {True: "sliding_attention", False: "full_attention"}
        found["layer_types"] = [kinds[bool(is_local)] for is_local in pattern]
    else:
        found["sliding_window_pattern"] = pattern
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if cap := read.optional_number(name):
            found[name] = cap
    return found


def _rope_scaling(file: GgufFile, read: _Reader, config: dict[str, Any]) -> dict[str, Any] | None:
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
