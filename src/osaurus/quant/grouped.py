"""Grouped affine codes: the one quantized form every format is decoded to.

    W[n, k] = code[n, k] * scale[n, k // group] + bias[n, k // group]

Codes of b bits are 0..2^b - 1. Scales keep the precision of the file, or have the float32 that
its parts multiply to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Weights that are decoded at a time: what lies beside the result stays at some megabytes.
SLAB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """codes: [N, K] uint8; scale, bias: [N, K / group_size] float16, bfloat16 or float32.

    `order` [K] int64, where there is one, says which input feature each column multiplies:
    GPTQ quantizes columns by importance, and a group holds those that came together.
    """

    bits: int
    group_size: int
    codes: Tensor
    scale: Tensor
    bias: Tensor
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in the order of the input features, computed in float32 and rounded once."""
        n, k = self.shape
        codes = self.codes.float().view(n, k // self.group_size, self.group_size)
        weight = codes * self.scale.float().unsqueeze(-1) + self.bias.float().unsqueeze(-1)
        weight = weight.view(n, k).to(dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def select_rows(self, rows: Tensor | slice) -> GroupedWeight:
        """The same weight with its output features in another order (or fewer of them)."""
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], bias=self.bias[rows])

    def with_group_size(self, size: int) -> GroupedWeight:
        """The same weight in groups of `size`, a divisor of the present one."""
        times = self.group_size // size
        if times == 1:
            return self
        return replace(
            self,
            group_size=size,
            scale=self.scale.repeat_interleave(times, dim=1),
            bias=self.bias.repeat_interleave(times, dim=1),
        )

    def to(self, device: torch.device) -> GroupedWeight:
        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            bias=self.bias.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def is_finite(self) -> bool:
        return bool(self.scale.isfinite().all()) and bool(self.bias.isfinite().all())

    def can_join(self, other: GroupedWeight) -> bool:
        """Whether both can be one weight: the same form and columns in the same order."""
        if (self.order is None) != (other.order is None):
            return False
        if (
            self.order is not None
            and other.order is not None
            and not torch.equal(self.order, other.order)
        ):
            return False
        return (self.bits, self.group_size, self.scale.dtype, self.bias.dtype) == (
            other.bits,
            other.group_size,
            other.scale.dtype,
            other.bias.dtype,
        )

    def slabs(self) -> Iterator[GroupedWeight]:
        """The weight in pieces of consecutive output features, as views."""
        n, k = self.shape
        for rows in slab_rows(n, k):
            yield self.select_rows(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class UndecodedWeight:
    """A weight whose rows are decoded a slab at a time: an embedding in full would for a
    moment be several times as large as its packed form.

    `read` gives the output features of a slice, always in the same form and without `order`.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int
    device: torch.device
    read: Callable[[slice], GroupedWeight]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K], each slab computed in float32 and rounded once."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for rows in slab_rows(*self.shape):
            out[rows] = self.read(rows).dequantize(dtype)
        return out

    def slabs(self) -> Iterator[GroupedWeight]:
        for rows in slab_rows(*self.shape):
            yield self.read(rows)


def slab_rows(n: int, k: int, weights: int | None = None) -> Iterator[slice]:
    """Slices of [n, k] with about `weights` (`SLAB`) weights, each but the last of a multiple
    of 64 rows (the largest tile of a packed layout)."""
    step = max(64, (weights or SLAB) // k // 64 * 64)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def concat(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """One weight with the output features of all parts; they must agree in form."""
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        bias=torch.cat([part.bias for part in parts]),
    )
