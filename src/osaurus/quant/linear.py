"""The linear layers models are built from. Each owns its weight form and routes rows.

Decode and verify rows ("small" rows, always first in a batch) go to a kernel whose rows are
exact whatever their number; prefill rows go to one large bfloat16 product. Dequantizing is
this layer's affair, never a model's.

Letters: T rows, N output features, K input features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.kernels import quant_matmul
from osaurus.kernels.linear import gemm_dtype, linear_rows, matmul_many
from osaurus.quant.grouped import GroupedWeight, concat

#: Logits of this many best tokens are recomputed in float32 (see `QuantizedHead`).
REFINED_LOGITS = 64


class Linear(Protocol):
    """x [T, K] to [T, N]; the first `num_small` rows are decode and verify rows.

    The output has x's dtype. A row's bits depend on that row and on which of the two kinds
    it is, on nothing else.
    """

    out_features: int
    in_features: int

    def __call__(self, x: Tensor, num_small: int) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


class DenseLinear:
    """A plain weight [N, K] in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        if num_small == x.shape[0]:
            return linear_rows(x, self.weight, self.bias)
        if num_small == 0:
            return self._large(x)
        small = linear_rows(x[:num_small], self.weight, self.bias)
        return torch.cat([small, self._large(x[num_small:])])

    def _large(self, x: Tensor) -> Tensor:
        out = matmul_many(x, self.weight.t())
        return out if self.bias is None else out + self.bias


class PackedLinear:
    """A 4-bit or 8-bit grouped weight in torch's packed form (CPU).

    An 8-bit code c is kept as two 4-bit codes, c // 16 and c % 16, side by side along K: one
    packed product over [x, x] then sums both halves in float32. Small rows read bfloat16
    scales (the kernel takes no others); prefill rows and `rows()` read the file's own.
    """

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        n, self.in_features = weight.shape
        self.out_features = n
        layout = quant_matmul.packed_layout()
        if layout is None:
            raise ValueError("no packed kernel here; use UnpackedLinear")
        self._padded = -(-n // layout.tile) * layout.tile
        self._group = weight.group_size
        self._bits = weight.bits
        self._bias = bias
        codes = F.pad(weight.codes, (0, 0, 0, self._padded - n))
        if self._bits == 8:
            codes = torch.cat([codes >> 4, codes & 15], dim=1)
        self._packed = quant_matmul.pack(codes)
        # [G, N] is the order in which both the kernel and the dequantizer walk.
        self._scale = F.pad(weight.scale.t(), (0, self._padded - n)).contiguous()
        self._offset = F.pad(weight.bias.t(), (0, self._padded - n)).contiguous()
        self._scale_zero = self._kernel_scales()

    def _kernel_scales(self) -> Tensor:
        """[G, N, 2] bfloat16 (scale, value of code 8), rounded around the middle code so
        that the rounding of the scale does not shift the group as a whole."""
        scale, offset = self._scale.float(), self._offset.float()
        if self._bits == 4:
            pairs = [(scale, offset + 8 * scale)]
        else:
            pairs = [(16 * scale, offset + 128 * scale), (scale, 8 * scale)]
        return torch.cat([torch.stack(pair, dim=-1) for pair in pairs]).bfloat16()

    @property
    def nbytes(self) -> int:
        tensors = [self._packed, self._scale, self._offset, self._scale_zero]
        return sum(t.nbytes for t in tensors) + (self._bias.nbytes if self._bias is not None else 0)

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        rows = x.shape[0]
        if num_small == rows:
            return self._small(x)
        if num_small == 0:
            return self._large(x)
        return torch.cat([self._small(x[:num_small]), self._large(x[num_small:])])

    def _small(self, x: Tensor) -> Tensor:
        if self._bits == 8:
            x = torch.cat([x, x], dim=1)
        out = quant_matmul.matmul(x, self._packed, self._group, self._scale_zero)
        return self._finish(out)

    def _large(self, x: Tensor) -> Tensor:
        dtype = gemm_dtype()
        if self._bits == 4:
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
        planes = 2 if self._bits == 8 else 1
        codes = quant_matmul.gather_rows(
            self._packed, index, self._padded, planes * self.in_features
        ).float()
        if self._bits == 8:
            codes = 16 * codes[:, : self.in_features] + codes[:, self.in_features :]
        codes = codes.view(-1, self.in_features // self._group, self._group)
        scale = self._scale.index_select(1, index).t().float().unsqueeze(-1)
        offset = self._offset.index_select(1, index).t().float().unsqueeze(-1)
        return (codes * scale + offset).view(-1, self.in_features)


class UnpackedLinear:
    """A grouped weight without a packed kernel (other devices and processors): codes stay
    quantized in memory, 4-bit ones two a byte, and are dequantized at every call."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._group = weight.group_size
        self._bits = weight.bits
        self._bias = bias
        codes = weight.codes
        self._codes = codes[:, ::2] | (codes[:, 1::2] << 4) if weight.bits == 4 else codes
        self._scale, self._offset = weight.scale, weight.bias

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
        if self._bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1)
        codes = codes.float().view(codes.shape[0], -1, self._group)
        weight = codes * scale.float().unsqueeze(-1) + offset.float().unsqueeze(-1)
        return weight.view(codes.shape[0], self.in_features)


class JoinedLinear:
    """Projections of the same input whose forms differ, their outputs side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        return torch.cat([part(x, num_small) for part in self.parts], dim=-1)


QuantizedLinear = PackedLinear | UnpackedLinear


def quantized_linear(weight: GroupedWeight, bias: Tensor | None = None) -> QuantizedLinear:
    """The fastest layer this device and processor have for a grouped weight."""
    layout = quant_matmul.packed_layout()
    if layout is not None:
        n, k = weight.shape
        padded = -(-n // layout.tile) * layout.tile
        if quant_matmul.is_available(padded, k, weight.group_size, weight.codes.device):
            return PackedLinear(weight, bias)
    return UnpackedLinear(weight, bias)


def fused_linear(
    weights: Sequence[GroupedWeight | Tensor], biases: Sequence[Tensor | None]
) -> Linear:
    """One layer computing several projections of one input, outputs in the order given."""
    groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    dense = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(groups) == len(weights) and all(groups[0].can_join(other) for other in groups):
        return quantized_linear(concat(groups), _join_biases(weights, biases))
    if len(dense) == len(weights):
        return DenseLinear(torch.cat(dense), _join_biases(weights, biases))
    return JoinedLinear([fused_linear([w], [b]) for w, b in zip(weights, biases, strict=True)])


def _join_biases(
    weights: Sequence[GroupedWeight | Tensor], biases: Sequence[Tensor | None]
) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    parts = [
        bias if bias is not None else present[0].new_zeros(weight.shape[0])
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return torch.cat(parts)


class DenseEmbedding:
    """Token vectors [V, C]; also the head of a model that ties both."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 to [T, C] float32."""
        return self.weight.index_select(0, ids).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, C] float32 (normalised) to [L, V] float32."""
        return linear_rows(hidden.to(self.weight.dtype), self.weight).float()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class QuantizedEmbedding:
    """Token vectors kept as grouped codes; also the head of a model that ties both.

    The packed kernel's output is bfloat16, whose steps (1/8 at 20) make ties and flips among
    the best tokens. The `REFINED_LOGITS` best are therefore recomputed in float32 from the
    file's scales, which costs 64 short dot products a row.
    """

    def __init__(self, weight: GroupedWeight) -> None:
        self._linear = quantized_linear(weight)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 to [T, C] float32."""
        return self._linear.rows(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, C] float32 (normalised) to [L, V] float32."""
        coarse = self._linear(hidden.bfloat16(), hidden.shape[0]).float()
        best = coarse.topk(min(REFINED_LOGITS, coarse.shape[1]), dim=-1).indices
        weights = self._linear.rows(best.flatten()).view(*best.shape, -1)
        return coarse.scatter_(1, best, (weights * hidden.unsqueeze(1)).sum(dim=-1))

    @property
    def nbytes(self) -> int:
        return self._linear.nbytes


Embedding = DenseEmbedding | QuantizedEmbedding
