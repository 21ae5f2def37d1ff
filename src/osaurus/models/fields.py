"""Reading a published config: fields that must be there, and what every decoder's config has.

In: the dict of a `config.json` (or of a GGUF, in the same spelling). Out: checked values; an
`UnsupportedBundle` names the first field that is missing or cannot be served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osaurus.errors import UnsupportedBundle


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What families share, in published spelling. `rotary_dim` of a head's numbers turn."""

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
    rotary_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool


def common_fields(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `DecoderConfig`; `defaults` are what the family's published configs
    may leave out."""
    config = {**defaults, **{name: value for name, value in config.items() if value is not None}}
    require_counts(config, ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
    refuse(config, "hidden_act", ["silu", "swish"])
    heads, kv_heads = head_counts(config)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    theta, scaling, partial = rope_settings(config)
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_dim": int(head_dim * partial),
        "max_position_embeddings": int(config.get("max_position_embeddings") or 2048),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def require_counts(config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises `UnsupportedBundle` naming the first field that is no positive whole number."""
    for name in names:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedBundle(f"config.json: {name} is missing or not a whole number")


def head_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """(query heads, kv heads); the first must be a multiple of the second."""
    require_counts(config, ["num_attention_heads"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UnsupportedBundle(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return heads, kv_heads


def rope_settings(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None, float]:
    """(theta, scaling, the part of a head that turns).

    transformers 5 keeps all three in `rope_parameters`; before, they were `rope_theta`,
    `rope_scaling` and `partial_rotary_factor`.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    return float(theta), rope or None, float(partial or 1.0)


def layer_windows(config: Mapping[str, Any], pattern: int) -> tuple[int | None, ...]:
    """Each layer's window, None for full attention: `layer_types` decide, else every
    `pattern`th layer is full."""
    layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    types = config.get("layer_types") or [
        "sliding_attention" if window and (layer + 1) % pattern else "full_attention"
        for layer in range(layers)
    ]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if len(types) != layers or unknown or ("sliding_attention" in types and not window):
        raise UnsupportedBundle(
            f"config.json: layer_types {sorted(set(types))} of {len(types)} layers with "
            f"sliding_window {window!r}"
        )
    return tuple(int(window or 0) if kind == "sliding_attention" else None for kind in types)


def refuse(config: Mapping[str, Any], name: str, served: Sequence[object]) -> None:
    """Raises `UnsupportedBundle` when a field that is present has a value not in `served`."""
    value = config.get(name, served[0])
    if value not in served:
        raise UnsupportedBundle(f"config.json: {name} {value!r} is not supported")
