"""compressed-tensors checkpoints: packed and plain integers, E4M3, NVFP4 and MXFP4.

Source: the `compressed-tensors` package (its compressors' parameter names, `pack_to_int32`,
`dequantize`): integers are packed as code + 2^(bits - 1) along the input features, zero points
so along the output features; NVFP4's group scales are divided by the matrix's.
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
from osaurus.quant.fp8 import Fp8
from osaurus.quant.gptq import with_zero_points
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.scheme import FLOATS, Part, Scheme

#: What activations or a quantized cache would need; weights are multiplied in bfloat16 here.
_IGNORED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


def from_group(entry: Mapping[str, Any], form: str) -> Scheme:
    """The scheme of one of `config_groups`, `form` being its own or the checkpoint's format.

    Raises `UnsupportedBundle` naming what is not served.
    """
    weights = entry.get("weights")
    if not isinstance(weights, Mapping):
        raise UnsupportedBundle("compressed-tensors: a group of layers without `weights`")
    form = str(entry.get("format") or form)
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    size, block = weights.get("group_size"), weights.get("block_structure")
    symmetric = weights.get("symmetric", True) is not False
    if strategy is None:
        strategy = "group" if isinstance(size, int) and size > 0 else "channel"
    group = size if strategy == "group" and isinstance(size, int) else 0
    if strategy in _STRATEGIES:
        if form == "pack-quantized" and bits in (4, 8) and strategy in ("group", "channel"):
            return PackedIntegers(bits, group, symmetric)
        if form == "int-quantized" and bits == 8 and strategy != "block":
            return PlainIntegers(group, symmetric)
        if form == "nvfp4-pack-quantized":
            return Fp4(16, has_global_scale=True)
        if form == "mxfp4-pack-quantized":
            return Fp4(32, has_global_scale=False)
        if form in ("float-quantized", "naive-quantized") and weights.get("type") == "float":
            if strategy in ("tensor", "channel"):
                return Fp8("weight_scale", None, _IGNORED)
            if strategy == "block" and isinstance(block, list) and len(block) == 2:
                return Fp8("weight_scale", (int(block[0]), int(block[1])), _IGNORED)
    raise UnsupportedBundle(
        f"compressed-tensors format {form!r} with {bits} bits by {strategy} is not supported"
    )


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """`pack-quantized`. `group_size` 0: one scale a row."""

    bits: int
    group_size: int
    symmetric: bool
    marker: str = "weight_packed"
    ignored: tuple[str, ...] = _IGNORED
    rows_first: bool = False

    def __str__(self) -> str:
        return f"compressed-tensors, {self.bits} bits in {_groups(self.group_size)}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        group = self.group_size or k
        if k % group or (k * self.bits) % 32 or (n * self.bits) % 32:
            raise UnsupportedBundle(
                f"a matrix of {n} x {k} is not whole groups of {group} and words of "
                f"{self.bits} bits"
            )
        groups = k // group
        parts = {
            "weight_packed": Part(((n, k * self.bits // 32),), ("I32",)),
            "weight_scale": Part(((n, groups),), FLOATS),
            "weight_shape": Part(((2,),), ("I64", "I32"), optional=True),
            "weight_g_idx": Part(((k,),), ("I32", "I64"), optional=True),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = Part(((n * self.bits // 32, groups),), ("I32",))
        return parts

    def decode(
        self, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> GroupedWeight | Tensor:
        if "weight_shape" in stored and tuple(stored["weight_shape"].tolist()) != shape:
            raise UnsupportedBundle(
                f"weight_shape says {tuple(stored['weight_shape'].tolist())}, the config {shape}"
            )
        scale = stored["weight_scale"].clone()
        if "weight_zero_point" in stored:
            zeros = unpack(bytes_of(stored["weight_zero_point"].t()), self.bits).t()
        else:
            zeros = scale.new_full((1, 1), 1 << (self.bits - 1))
        return with_zero_points(
            unpack(bytes_of(stored["weight_packed"]), self.bits),
            scale,
            zeros,
            bits=self.bits,
            group_of=_assigned_groups(stored),
        )


@dataclass(frozen=True, slots=True)
class PlainIntegers:
    """`int-quantized`: one signed byte a weight."""

    group_size: int
    symmetric: bool
    marker: str = "weight_scale"
    ignored: tuple[str, ...] = _IGNORED
    rows_first: bool = False

    def __str__(self) -> str:
        return f"compressed-tensors, 8 bits in {_groups(self.group_size)}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        group = self.group_size or k
        if k % group:
            raise UnsupportedBundle(f"{k} input features are not whole groups of {group}")
        scales: tuple[tuple[int, ...], ...] = ((n, k // group),)
        if not self.group_size:
            scales = ((n, 1), (n,), (1,), ())
        parts = {
            "weight": Part(((n, k),), ("I8",)),
            "weight_scale": Part(scales, FLOATS),
            "weight_g_idx": Part(((k,),), ("I32", "I64"), optional=True),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = Part(scales, ("I8",))
        return parts

    def decode(
        self, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> GroupedWeight | Tensor:
        codes = stored["weight"].view(torch.uint8) ^ 128
        scale = _by_row(stored["weight_scale"], shape[0]).clone()
        zeros = scale.new_full((1, 1), 128)
        if "weight_zero_point" in stored:
            zeros = _by_row(stored["weight_zero_point"], shape[0]).short() + 128
        return with_zero_points(codes, scale, zeros, bits=8, group_of=_assigned_groups(stored))


@dataclass(frozen=True, slots=True)
class Fp4:
    """`nvfp4-pack-quantized` and `mxfp4-pack-quantized`: two E2M1 codes a byte."""

    group_size: int
    has_global_scale: bool
    marker: str = "weight_packed"
    ignored: tuple[str, ...] = _IGNORED
    rows_first: bool = False

    def __str__(self) -> str:
        return f"{'NVFP4' if self.has_global_scale else 'MXFP4'} in groups of {self.group_size}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        if k % self.group_size:
            raise UnsupportedBundle(f"{k} input features are not whole groups of {self.group_size}")
        scale = ("F8_E4M3",) if self.has_global_scale else ("U8", "F8_E8M0")
        parts = {
            "weight_packed": Part(((n, k // 2),), ("U8",)),
            "weight_scale": Part(((n, k // self.group_size),), scale),
        }
        if self.has_global_scale:
            parts["weight_global_scale"] = Part(((), (1,)), ("F32",))
        return parts

    def decode(self, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedWeight:
        codes = unpack(stored["weight_packed"], 4)
        if self.has_global_scale:
            scale = stored["weight_scale"].float() / stored["weight_global_scale"]
        else:
            scale = floats.e8m0(stored["weight_scale"])
        return floats.e2m1_weight(codes, scale)


def _groups(size: int) -> str:
    return f"groups of {size}" if size else "rows"


def _by_row(values: Tensor, n: int) -> Tensor:
    """[N, G] of what is stored for each group, each row, or once."""
    return values if values.dim() == 2 else values.reshape(-1, 1).expand(n, 1)


def _assigned_groups(stored: Mapping[str, Tensor]) -> Tensor | None:
    """The group of each column; -1 throughout stands for consecutive ones."""
    assigned = stored.get("weight_g_idx")
    return None if assigned is None or bool((assigned == -1).all()) else assigned
