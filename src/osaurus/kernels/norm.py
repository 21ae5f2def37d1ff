"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., C] float32; weight: [C] float32. Computed in float32, rounded once to `dtype`.
    """
    return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
