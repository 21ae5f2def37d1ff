"""Checkpoints of E4M3 weights with float scales, dequantized to bfloat16.

Source: transformers' `finegrained_fp8` and DeepSeek-V3's `weight_scale_inv` (one scale a block
of `weight_block_size`, by which the weight is multiplied), `fbgemm_fp8` and static FP8
(`weight_scale`, one a matrix or a row). There is no E4M3 product on a CPU, and codes of a
floating type are in no group affine; bfloat16 holds what is lost nowhere but in the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant import floats
from osaurus.quant.scheme import FLOATS, Part


@dataclass(frozen=True, slots=True)
class Fp8:
    """`block` (rows, columns) shares a scale; None: a matrix or each of its rows does."""

    marker: str
    block: tuple[int, int] | None
    ignored: tuple[str, ...] = ("input_scale", "activation_scale", "input_scale_ub")
    rows_first: bool = False

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> Fp8:
        block = entry.get("weight_block_size")
        if block is None:
            return cls("weight_scale", None)
        if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int for b in block):
            raise UnsupportedBundle(f"weight_block_size {block!r} is no pair of sizes")
        if min(block) < 1:
            raise UnsupportedBundle(f"weight_block_size {block!r} has no size")
        return cls("weight_scale_inv", (block[0], block[1]))

    def __str__(self) -> str:
        if self.block is None:
            return "FP8 with a scale for each matrix or row"
        return f"FP8 with a scale for each {self.block[0]} x {self.block[1]}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        if self.block is None:
            shapes: tuple[tuple[int, ...], ...] = ((), (1,), (n, 1), (n,))
        else:
            shapes = ((-(-n // self.block[0]), -(-k // self.block[1])),)
        return {
            "weight": Part(((n, k),), ("F8_E4M3",)),
            self.marker: Part(shapes, FLOATS),
        }

    def decode(self, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        n, k = shape
        scale = stored[self.marker].float()
        if self.block is not None:
            return floats.scaled(stored["weight"], scale, self.block)
        scale = scale.reshape(-1, 1)
        return floats.scaled(stored["weight"], scale, (n // scale.shape[0], k))
