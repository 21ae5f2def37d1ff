"""Reading a published config: fields that must be there, and the spellings of rope settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from osaurus.errors import UnsupportedBundle


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


def rope_settings(
    config: Mapping[str, Any], default_theta: float = 10000.0
) -> tuple[float, dict[str, Any] | None, float]:
    """(theta, scaling, partial factor), 1.0 for a whole rotation.

    transformers 5 keeps all three in `rope_parameters`; before, they were `rope_theta`,
    `rope_scaling` and `partial_rotary_factor`.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or default_theta
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    return float(theta), rope or None, float(partial or 1.0)


def refuse(config: Mapping[str, Any], name: str, served: Sequence[object]) -> None:
    """Raises `UnsupportedBundle` when a field that is present has a value not in `served`."""
    value = config.get(name, served[0])
    if value not in served:
        raise UnsupportedBundle(f"config.json: {name} {value!r} is not supported")
