"""MLX's quantized matrices: `weight` in 32-bit words, `scales`, and `biases` in affine mode.

Source: `mlx.core.quantize` (its table of modes) and `mlx_lm.utils.load_model`: the config's
`quantization` holds `group_size`, `bits`, `mode` and, under a module's path, other values for
that module or false; a module is quantized when its `scales` are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant import floats
from osaurus.quant.bits import bytes_of, unpack
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.scheme import FLOATS, Part

#: mode -> bits and group sizes there are; the first of each is the default.
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
#: nvfp4's optional scale of a whole matrix is its largest magnitude: of E2M1 times E4M3.
_NVFP4_MAX = 6.0 * 448.0


@dataclass(frozen=True, slots=True)
class Mlx:
    mode: str
    bits: int
    group_size: int
    marker: str = "scales"
    ignored: tuple[str, ...] = ()
    rows_first: bool = True

    @classmethod
    def from_config(cls, entry: Mapping[str, Any], default: Mlx | None = None) -> Mlx:
        """Raises `UnsupportedBundle` naming a value that MLX does not have. What a module's
        entry leaves out is the whole model's, unless its mode is another."""
        mode = entry.get("mode", default.mode if default else "affine")
        if mode not in MODES:
            served = ", ".join(MODES)
            raise UnsupportedBundle(
                f"quantization mode {mode!r} is not supported (served: {served})"
            )
        inherited = default if default is not None and default.mode == mode else None
        all_bits, groups = MODES[mode]
        bits = entry.get("bits", inherited.bits if inherited else all_bits[0])
        group = entry.get("group_size", inherited.group_size if inherited else groups[0])
        if bits not in all_bits or group not in groups:
            raise UnsupportedBundle(
                f"{mode} quantization with bits {bits!r} and group_size {group!r} is not supported "
                f"(bits: {_listed(all_bits)}; group sizes: {_listed(groups)})"
            )
        return cls(mode, bits, group)

    def __str__(self) -> str:
        return f"MLX {self.mode}, {self.bits} bits in groups of {self.group_size}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        if k % self.group_size:
            raise UnsupportedBundle(f"{k} input features are not whole groups of {self.group_size}")
        groups = (n, k // self.group_size)
        weight = Part(((n, k * self.bits // 32),), ("U32",))
        if self.mode == "affine":
            scales = Part((groups,), FLOATS)
            return {"weight": weight, "scales": scales, "biases": scales}
        parts = {"weight": weight, "scales": Part((groups,), ("U8",))}
        if self.mode == "nvfp4":
            parts["global_scale"] = Part(((), (1,)), ("F32",), optional=True)
        return parts

    def decode(
        self, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> GroupedWeight | Tensor:
        data, scales = bytes_of(stored["weight"]), stored["scales"]
        if self.mode == "affine":
            return GroupedWeight(
                bits=self.bits,
                group_size=self.group_size,
                codes=unpack(data, self.bits),
                scale=scales.clone(),
                bias=stored["biases"].clone(),
            )
        if self.mode == "nvfp4":
            scale = floats.e4m3(scales)
            if "global_scale" in stored:
                scale = scale * (stored["global_scale"].float() / _NVFP4_MAX)
            return floats.e2m1_weight(unpack(data, 4), scale)
        scale = floats.e8m0(scales)
        if self.mode == "mxfp4":
            return floats.e2m1_weight(unpack(data, 4), scale)
        return floats.scaled(data.view(torch.float8_e4m3fn), scale, (1, self.group_size))


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in sorted(values))
