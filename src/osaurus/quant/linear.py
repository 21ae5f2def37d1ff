"""The linear layers models are built from. Each owns its weight form and routes rows.

With native kernels all rows take one of them (quant/native.py). Without, decode and verify rows
("small" rows, always first in a batch) go to a kernel whose rows are exact whatever their number
and prefill rows to one large bfloat16 product. Dequantizing is this layer's affair, never a
model's.

Letters: T rows, N output features, K input features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from osaurus.kernels.linear import linear_rows
from osaurus.kernels.native.matrix import NativeMatrix
from osaurus.quant.dense import DenseLinear, concat_rows
from osaurus.quant.grouped import GroupedWeight, UndecodedWeight, concat
from osaurus.quant.native import NativeLinear, can_be_native, native_linear
from osaurus.quant.packed import HALF_GROUP, PackedLinear, UnpackedLinear, can_pack

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


class ReorderedLinear:
    """A layer whose columns lie in another order than its input features.

    `order` [K]: which input feature each column of `inner` multiplies.
    """

    def __init__(self, inner: Linear, order: Tensor) -> None:
        self.inner = inner
        self._order = order
        self.out_features, self.in_features = inner.out_features, inner.in_features

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self._order.nbytes

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        return self.inner(x.index_select(1, self._order), num_small)


QuantizedLinear = NativeLinear | PackedLinear | UnpackedLinear


def quantized_linear(
    weight: GroupedWeight | UndecodedWeight, bias: Tensor | None = None
) -> QuantizedLinear:
    """The fastest layer this device and processor have that keeps a grouped weight quantized;
    an `order` is the caller's affair."""
    if can_be_native(weight):
        return native_linear(weight, bias)
    return PackedLinear(weight, bias) if can_pack(weight) else UnpackedLinear(weight, bias)


def is_better_dense(weight: GroupedWeight | UndecodedWeight) -> bool:
    """Whether bfloat16 serves a weight better than its packed form: codes of more than 4 bits
    in groups of 16 would take as many bytes with their scales, and four products."""
    if can_be_native(weight):
        return False
    return weight.group_size == HALF_GROUP and weight.bits > 4 and can_pack(weight)


def grouped_linear(weight: GroupedWeight, bias: Tensor | None = None) -> Linear:
    """The layer that computes with a grouped weight in the shipped mode."""
    if is_better_dense(weight):
        return DenseLinear(weight.dequantize(torch.bfloat16), bias)
    linear = quantized_linear(weight, bias)
    return linear if weight.order is None else ReorderedLinear(linear, weight.order)


def fused_linear(
    weights: Sequence[GroupedWeight | Tensor], biases: Sequence[Tensor | None]
) -> Linear:
    """One layer computing several projections of one input, outputs in the order given."""
    groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    dense = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(groups) == len(weights) and all(groups[0].can_join(other) for other in groups):
        return grouped_linear(concat(groups), _join_biases(weights, biases))
    if len(dense) == len(weights):
        weight, bias = concat_rows(dense), _join_biases(weights, biases)
        return native_linear(weight, bias) if can_be_native(weight) else DenseLinear(weight, bias)
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

    The output of torch's packed kernel is bfloat16, whose steps (1/8 at 20) make ties and flips
    among the best tokens. The `REFINED_LOGITS` best are there recomputed in float32 from the
    file's scales, which costs 64 short dot products a row.
    """

    def __init__(self, weight: GroupedWeight | UndecodedWeight) -> None:
        self._linear = PackedLinear(weight) if can_pack(weight) else UnpackedLinear(weight)

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


class NativeEmbedding:
    """Token vectors in the native kernels' form; also the head of a model that ties both."""

    def __init__(self, matrix: NativeMatrix) -> None:
        self.matrix = matrix

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 to [T, C] float32."""
        return self.matrix.rows(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, C] float32 (normalised) to [L, V] float32."""
        return self.matrix.linear(hidden, torch.float32)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


def native_matrices(linear: Linear) -> list[NativeMatrix] | None:
    """The matrices whose outputs, side by side, are the layer's; None for a layer that is more
    than that or not native."""
    parts = linear.parts if isinstance(linear, JoinedLinear) else (linear,)
    found = [part.matrix for part in parts if isinstance(part, NativeLinear)]
    return found if len(found) == len(parts) else None


Embedding = DenseEmbedding | QuantizedEmbedding | NativeEmbedding


def grouped_embedding(weight: GroupedWeight | UndecodedWeight) -> Embedding:
    """The embedding or head of a grouped weight in the shipped mode."""
    has_order = isinstance(weight, GroupedWeight) and weight.order is not None
    if has_order or is_better_dense(weight):
        return DenseEmbedding(weight.dequantize(torch.bfloat16))
    if can_be_native(weight):
        return NativeEmbedding(native_linear(weight).matrix)
    return QuantizedEmbedding(weight)
