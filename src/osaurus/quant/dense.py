"""A weight in plain numbers, and the routing of few and many rows to their products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from osaurus.kernels.linear import linear_rows, matmul_many


def hollow(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of that shape in the memory of one zero, for looking at shapes only. (torch's
    `meta` device serves for the same, and imports 800 modules at its first concatenation.)"""
    return torch.zeros((), dtype=dtype).expand(shape)


def concat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Weights [N, K] of the same K below each other; of hollow ones, another such."""
    if len(parts) == 1:
        return parts[0]
    if all(not any(part.stride()) for part in parts):
        return hollow((sum(part.shape[0] for part in parts), parts[0].shape[1]), parts[0].dtype)
    return torch.cat(list(parts))


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
