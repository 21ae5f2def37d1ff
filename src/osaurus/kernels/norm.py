"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., C] float32; weight: [C] float32. Computed in float32, rounded once to `dtype`.
    """
    # Six small operations: torch's own rms_norm makes two more temporaries of x's size and
    # takes 12 us instead of 8 for one row of 576, 0.9 ms instead of 0.07 for 512 of them.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = length.mul_(length).mul_(1 / x.shape[-1]).add_(eps)
    return (x * mean_square.rsqrt_()).mul_(weight).to(dtype)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in float64; the oracle."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
