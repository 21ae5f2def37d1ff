"""Batched products whose matrices do not know how many they are."""

from __future__ import annotations

import torch
from torch import Tensor


def batched_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """torch.bmm, each product with the same bits alone and among others.

    a: [B, M, D], b: [B, D, N], float32; out: [B, M, N] to write to. torch splits a lone
    product over its threads in another way than one of several, so it is given a twin.
    """
    if a.shape[0] != 1:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    pair = torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return pair if out is None else out.copy_(pair)
