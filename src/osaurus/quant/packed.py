"""Grouped weights that stay quantized in memory: in torch's packed form where this processor has
one, else as codes.

Letters: N output features, K input features, G groups of a row, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.kernels import quant_matmul
from osaurus.kernels.linear import gemm_dtype, matmul_many
from osaurus.quant.dense import DenseLinear
from osaurus.quant.grouped import GroupedWeight, UndecodedWeight

#: Groups of half the kernel's smallest are taken two at a time (see `PackedLinear`).
HALF_GROUP = min(quant_matmul.GROUP_SIZES) // 2


class PackedLinear:
    """A grouped weight in torch's packed 4-bit form (CPU).

    A code c of more than 4 bits is kept as two side by side along K, its upper four bits and
    the rest: one packed product over [x, x] then sums both halves in float32. One of fewer is
    raised to lie around 8, which the kernel's scales are rounded about.

    Two groups of 16 share one of the kernel's groups of 32. With a and b the parts of x that
    they multiply, s and t their scales, sa + tb = (s + t)/2 (a + b) + (s - t)/2 (a - b): one
    product of [a, b] with the mean scales and one of [a, -b] with half the differences.

    Small rows read bfloat16 scales (the kernel takes no others); prefill rows and `rows()` read
    the file's own.
    """

    def __init__(self, weight: GroupedWeight | UndecodedWeight, bias: Tensor | None = None) -> None:
        """Only for weights that `can_pack` accepts."""
        n, k = weight.shape
        self.out_features, self.in_features = n, k
        layout = quant_matmul.packed_layout()
        if layout is None:
            raise ValueError("no packed kernel here; use UnpackedLinear")
        self._padded = -(-n // layout.tile) * layout.tile
        self._bits = weight.bits
        self._low = max(0, weight.bits - 4)
        self._planes = 2 if self._low else 1
        self._raised = max(0, 8 - (1 << (weight.bits - 1)))
        self._group = weight.group_size
        if self._group != HALF_GROUP:
            self._group = next(
                size for size in reversed(quant_matmul.GROUP_SIZES) if self._group % size == 0
            )
        self._bias = bias
        self._fill(weight.slabs())
        if self._group == HALF_GROUP:
            signs = torch.ones(k // HALF_GROUP, HALF_GROUP, dtype=torch.bfloat16)
            signs[1::2] = -1
            self._signs = signs.flatten()

    def _fill(self, slabs: Iterator[GroupedWeight]) -> None:
        """Pack slab by slab, and turn scales to [G, N]: the order in which both the kernel and
        the dequantizer walk."""
        n, k = self._padded, self.in_features
        self._packed = torch.empty(n, self._planes * k // 2, dtype=torch.uint8)
        groups = k // max(self._group, 2 * HALF_GROUP)
        self._scale_zero = tuple(
            torch.empty(self._planes * groups, n, 2, dtype=torch.bfloat16)
            for _ in range(2 if self._group == HALF_GROUP else 1)
        )
        scales: list[Tensor] = []
        offsets: list[Tensor] = []
        start = 0
        for slab in slabs:
            slab = slab.with_group_size(self._group)
            last = start + slab.shape[0] == self.out_features
            padding = n - self.out_features if last else 0
            codes = slab.codes + self._raised if self._raised else slab.codes
            if padding:
                codes = F.pad(codes, (0, 0, 0, padding))
            if self._low:
                codes = torch.cat([codes >> self._low, codes & ((1 << self._low) - 1)], dim=1)
            scale, bias = slab.scale, slab.bias
            if self._raised:
                bias = bias.float() - self._raised * scale.float()
            scales.append(F.pad(scale.t(), (0, padding)))
            offsets.append(F.pad(bias.t(), (0, padding)))
            rows = slice(start, start + codes.shape[0])
            self._packed[rows] = quant_matmul.pack(codes)
            made = self._kernel_scales(scales[-1].float(), offsets[-1].float())
            for whole, part in zip(self._scale_zero, made, strict=True):
                whole[:, rows] = part
            start = rows.stop
        self._scale = torch.cat(scales, dim=1)
        self._offset = torch.cat(offsets, dim=1)

    def _kernel_scales(self, scale: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        """[G, N, 2] (scale, value of code 8) of each product from scale and offset [G, N], for
        the middle code, so that rounding the scale does not shift the group as a whole."""
        middle = 8 << self._low
        pairs = [((1 << self._low) * scale, offset + middle * scale)]
        if self._low:
            pairs.append((scale, 8 * scale))
        planes = [torch.stack(pair, dim=-1) for pair in pairs]
        if self._group != HALF_GROUP:
            return (torch.cat(planes),)
        first = torch.cat([plane[::2] for plane in planes])
        second = torch.cat([plane[1::2] for plane in planes])
        return (first + second) / 2, (first - second) / 2

    @property
    def nbytes(self) -> int:
        tensors = [self._packed, self._scale, self._offset, *self._scale_zero]
        return sum(t.nbytes for t in tensors) + (self._bias.nbytes if self._bias is not None else 0)

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        rows = x.shape[0]
        if num_small == rows:
            return self._small(x)
        if num_small == 0:
            return self._large(x)
        return torch.cat([self._small(x[:num_small]), self._large(x[num_small:])])

    def _small(self, x: Tensor) -> Tensor:
        out = self._product(x, 0)
        if self._group == HALF_GROUP:
            out = out + self._product(x * self._signs, 1)
        return self._finish(out)

    def _product(self, x: Tensor, which: int) -> Tensor:
        if self._planes == 2:
            x = torch.cat([x, x], dim=1)
        group = max(self._group, 2 * HALF_GROUP)
        return quant_matmul.matmul(x, self._packed, group, self._scale_zero[which])

    def _large(self, x: Tensor) -> Tensor:
        dtype = gemm_dtype()
        if self._planes == 1:
            weight = quant_matmul.dequantize_columns(self._packed, self._scale, self._offset, dtype)
        else:
            weight = self._dequantize(torch.arange(self._padded)).to(dtype).t()
        return self._finish(matmul_many(x.to(dtype), weight).to(x.dtype))

    def _finish(self, out: Tensor) -> Tensor:
        if self._padded != self.out_features:
            out = out[:, : self.out_features]
        return out if self._bias is None else out + self._bias

    def rows(self, index: Tensor) -> Tensor:
        """Output features [R] dequantized at the file's scale precision: [R, K] float32."""
        return self._dequantize(index)

    def _dequantize(self, index: Tensor) -> Tensor:
        k = self.in_features
        codes = quant_matmul.gather_rows(
            self._packed, index, self._padded, self._planes * k
        ).float()
        if self._low:
            codes = (1 << self._low) * codes[:, :k] + codes[:, k:]
        codes = codes.view(-1, k // self._group, self._group)
        scale = self._scale.index_select(1, index).t().float().unsqueeze(-1)
        offset = self._offset.index_select(1, index).t().float().unsqueeze(-1)
        return (codes * scale + offset).view(-1, k)


def can_pack(weight: GroupedWeight | UndecodedWeight) -> bool:
    """Whether this processor's packed kernel serves the weight."""
    n, k = weight.shape
    layout = quant_matmul.packed_layout()
    if layout is None:
        return False
    padded = -(-n // layout.tile) * layout.tile
    smallest = 2 * HALF_GROUP
    fits = weight.group_size == HALF_GROUP or weight.group_size % smallest == 0
    return fits and quant_matmul.is_available(padded, k, smallest, weight.device)


class UnpackedLinear:
    """A grouped weight without a packed kernel (other devices and processors): codes stay
    quantized in memory, those of up to 4 bits two a byte, and are dequantized at every call."""

    def __init__(self, weight: GroupedWeight | UndecodedWeight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._group = weight.group_size
        self._two_a_byte = weight.bits <= 4 and self.in_features % 2 == 0
        self._bias = bias
        codes, scales, offsets = [], [], []
        for slab in weight.slabs():
            part = slab.codes
            codes.append(part[:, ::2] | (part[:, 1::2] << 4) if self._two_a_byte else part)
            scales.append(slab.scale)
            offsets.append(slab.bias)
        self._codes = torch.cat(codes)
        self._scale, self._offset = torch.cat(scales), torch.cat(offsets)

    @property
    def nbytes(self) -> int:
        tensors = [self._codes, self._scale, self._offset]
        return sum(t.nbytes for t in tensors)

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        weight = self._dequantize(self._codes, self._scale, self._offset).to(x.dtype)
        return DenseLinear(weight, self._bias)(x, num_small)

    def rows(self, index: Tensor) -> Tensor:
        """Output features [R] dequantized: [R, K] float32."""
        return self._dequantize(self._codes[index], self._scale[index], self._offset[index])

    def _dequantize(self, codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        if self._two_a_byte:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1)
        codes = codes.float().view(codes.shape[0], -1, self._group)
        weight = codes * scale.float().unsqueeze(-1) + offset.float().unsqueeze(-1)
        return weight.view(codes.shape[0], self.in_features)
