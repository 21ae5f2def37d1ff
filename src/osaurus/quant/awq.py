"""AWQ checkpoints in the `gemm` layout: 4-bit codes packed along the output features.

Source: AutoAWQ's `WQLinear_GEMM`: nibble i of a word is output feature 0, 2, 4, 6, 1, 3, 5, 7 of
eight, for codes and zero points alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant.bits import bytes_of, unpack
from osaurus.quant.gptq import with_zero_points
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.scheme import FLOATS, Part

#: Which nibble of a word holds each of its eight features.
_NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """W[n, k] = (code - zero) * scale."""

    group_size: int
    marker: str = "qweight"
    ignored: tuple[str, ...] = ()
    rows_first: bool = False

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> Awq:
        bits = entry.get("bits", entry.get("w_bit"))
        group = entry.get("group_size", entry.get("q_group_size", 128))
        version = str(entry.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm" or not isinstance(group, int):
            raise UnsupportedBundle(
                f"AWQ with bits {bits!r}, version {version!r} and group_size {group!r} is not "
                "supported (4 bits, gemm)"
            )
        return cls(group)

    def __str__(self) -> str:
        return f"AWQ, 4 bits in groups of {self.group_size}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        group = self.group_size if self.group_size > 0 else k
        if k % group or n % 8:
            raise UnsupportedBundle(f"a matrix of {n} x {k} is not whole groups of {group}")
        return {
            "qweight": Part(((k, n // 8),), ("I32", "U32")),
            "qzeros": Part(((k // group, n // 8),), ("I32", "U32")),
            "scales": Part(((k // group, n),), FLOATS),
        }

    def decode(
        self, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> GroupedWeight | Tensor:
        codes = _features(stored["qweight"]).t().contiguous()
        zeros = _features(stored["qzeros"]).t()
        return with_zero_points(codes, stored["scales"].t().contiguous(), zeros, bits=4)


def _features(words: Tensor) -> Tensor:
    """[R, N / 8] words to [R, N] codes in the order of the output features."""
    nibbles = unpack(bytes_of(words), 4).unflatten(-1, (-1, 8))
    return nibbles[..., list(_NIBBLE_OF)].flatten(-2)
