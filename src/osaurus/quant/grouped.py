"""Grouped affine codes: the one quantized form every format is decoded to.

    W[n, k] = code[n, k] * scale[n, k // group] + bias[n, k // group]

4-bit codes are 0..15, 8-bit codes 0..255. Scales keep the precision of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """codes: [N, K] uint8; scale, bias: [N, K / group_size] float16, bfloat16 or float32."""

    bits: int
    group_size: int
    codes: Tensor
    scale: Tensor
    bias: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K], computed in float32 and rounded once."""
        n, k = self.shape
        codes = self.codes.float().view(n, k // self.group_size, self.group_size)
        weight = codes * self.scale.float().unsqueeze(-1) + self.bias.float().unsqueeze(-1)
        return weight.view(n, k).to(dtype)

    def select_rows(self, rows: Tensor) -> GroupedWeight:
        """The same weight with its output features in another order (or fewer of them)."""
        return GroupedWeight(
            bits=self.bits,
            group_size=self.group_size,
            codes=self.codes[rows],
            scale=self.scale[rows],
            bias=self.bias[rows],
        )

    def can_join(self, other: GroupedWeight) -> bool:
        return (self.bits, self.group_size, self.scale.dtype) == (
            other.bits,
            other.group_size,
            other.scale.dtype,
        )


def concat(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """One weight with the output features of all parts; they must agree in form."""
    return GroupedWeight(
        bits=parts[0].bits,
        group_size=parts[0].group_size,
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        bias=torch.cat([part.bias for part in parts]),
    )
