"""A weight in plain numbers, and the routing of few and many rows to their products."""

from __future__ import annotations

import torch
from torch import Tensor

from osaurus.kernels.linear import linear_rows, matmul_many


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
