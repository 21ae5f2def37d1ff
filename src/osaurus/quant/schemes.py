"""Which scheme stores which module, from the config's quantization entry.

In: a model's config. Out: `Schemes`, asked by module path (`model.layers.0.mlp.up_proj`). A method
that nobody here reads is refused by name before any weight is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from osaurus.errors import UnsupportedBundle
from osaurus.quant import compressed
from osaurus.quant.awq import Awq
from osaurus.quant.fp8 import Fp8
from osaurus.quant.gptq import Gptq
from osaurus.quant.mlx import Mlx
from osaurus.quant.modelopt import modelopt_scheme
from osaurus.quant.mxfp4 import Mxfp4
from osaurus.quant.scheme import Scheme

#: Patterns come from the bundle; one that needs longer than this is refused.
_PATTERN_TIMEOUT_S = 0.5

#: `quant_method` -> the scheme of the whole checkpoint.
_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": Gptq.from_config,
    "awq": Awq.from_config,
    "fp8": Fp8.from_config,
    "fbgemm_fp8": Fp8.from_config,
    "modelopt": modelopt_scheme,
    "mxfp4": Mxfp4.from_config,
}


@dataclass(frozen=True, slots=True)
class Schemes:
    """`overrides` by exact path come first, then `excluded` patterns, then the first of
    `targeted` that matches, then `default`. None: stored as plain numbers."""

    default: Scheme | None = None
    overrides: Mapping[str, Scheme | None] = field(default_factory=dict)
    excluded: Sequence[str] = ()
    targeted: Sequence[tuple[Sequence[str], Scheme]] = ()

    def of(self, path: str) -> Scheme | None:
        """How the module at `path` is stored where its marker is there."""
        if path in self.overrides:
            return self.overrides[path]
        if any(_matches(pattern, path) for pattern in self.excluded):
            return None
        for patterns, scheme in self.targeted:
            if any(_matches(pattern, path) for pattern in patterns):
                return scheme
        return self.default


def read_schemes(config: Mapping[str, Any]) -> Schemes:
    """The schemes of a checkpoint; one of plain numbers has none.

    Raises `UnsupportedBundle` for a method, mode or format that is not served.
    """
    # MLX writes both keys with the same content; the others have `quant_method`.
    entry = config.get("quantization") or config.get("quantization_config")
    nested = config.get("text_config")
    if entry is None and isinstance(nested, Mapping):
        entry = nested.get("quantization") or nested.get("quantization_config")
    if not entry:
        return Schemes()
    if not isinstance(entry, Mapping):
        raise UnsupportedBundle(f"config.json: quantization {entry!r} is no JSON object")
    try:
        return _read(entry)
    except UnsupportedBundle as error:
        raise UnsupportedBundle(f"config.json: {error.message}") from None


def _read(entry: Mapping[str, Any]) -> Schemes:
    method = entry.get("quant_method")
    if method is None or method == "mlx":
        return _mlx(entry)
    if method == "compressed-tensors":
        return _compressed_tensors(entry)
    if method not in _METHODS:
        served = ", ".join(sorted([*_METHODS, "compressed-tensors", "mlx"]))
        raise UnsupportedBundle(f"quant_method {method!r} is not supported (served: {served})")
    excluded = entry.get("modules_to_not_convert") or entry.get("exclude_modules") or ()
    return Schemes(default=_METHODS[method](entry), excluded=tuple(map(_anywhere, excluded)))


def _mlx(entry: Mapping[str, Any]) -> Schemes:
    default = Mlx.from_config(entry)
    overrides: dict[str, Scheme | None] = {}
    for path, value in entry.items():
        if isinstance(value, Mapping):
            overrides[path] = Mlx.from_config(value, default)
        elif value is False:
            overrides[path] = None
    return Schemes(default=default, overrides=overrides)


def _compressed_tensors(entry: Mapping[str, Any]) -> Schemes:
    form = str(entry.get("format", ""))
    groups = entry.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedBundle("compressed-tensors without config_groups")
    targeted = [
        (tuple(map(str, group.get("targets") or ["Linear"])), compressed.from_group(group, form))
        for group in groups.values()
        if isinstance(group, Mapping)
    ]
    return Schemes(excluded=tuple(map(str, entry.get("ignore") or ())), targeted=targeted)


def _anywhere(name: object) -> str:
    """`modules_to_not_convert` names parts of paths, `lm_head` or `model.layers.0.mlp.gate`."""
    return f"re:(.*\\.)?{regex.escape(str(name))}(\\..*)?$"


def _matches(pattern: str, path: str) -> bool:
    """A path, a class (every matrix here is one of `Linear`), or `re:` and an expression."""
    if not pattern.startswith("re:"):
        return pattern in (path, "Linear")
    try:
        return regex.match(pattern[3:], path, timeout=_PATTERN_TIMEOUT_S) is not None
    except (regex.error, TimeoutError) as error:
        raise UnsupportedBundle(
            f"config.json: the pattern {pattern[:60]!r} of its quantization cannot be used "
            f"({error or 'it takes too long'})"
        ) from None
