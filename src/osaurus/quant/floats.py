"""Small floating-point codes: E2M1 elements as grouped codes, E4M3 elements and scales, E8M0
scales.

Source: OCP Microscaling Formats (MX) 1.0, sections 5.3 and 5.4; NVFP4 is E2M1 in groups of 16
with E4M3 scales. Twice an E2M1 value is a whole number from -12 to 12, so a group of them is
affine in 5-bit codes with nothing lost. An E4M3 value has 4 significant bits: bfloat16 holds
it times a power of two exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant.grouped import GroupedWeight, slab_rows

#: Twice the value of an E2M1 code without its sign bit.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_MIDDLE = max(E2M1_DOUBLED)


def e2m1_codes(data: Tensor) -> Tensor:
    """4-bit codes [...] uint8 to 5-bit ones: twice the value, plus 12."""
    values = [_MIDDLE + v for v in E2M1_DOUBLED] + [_MIDDLE - v for v in E2M1_DOUBLED]
    return torch.tensor(values, dtype=torch.uint8)[data.int()]


def e2m1_weight(data: Tensor, scale: Tensor) -> GroupedWeight:
    """data: [N, K] uint8, each a 4-bit code; scale: [N, G] float32, one for K / G of them."""
    half = scale / 2
    return GroupedWeight(
        bits=5,
        group_size=data.shape[1] // scale.shape[1],
        codes=e2m1_codes(data),
        scale=half,
        bias=-_MIDDLE * half,
    )


def e8m0(data: Tensor) -> Tensor:
    """Exponents [...] uint8 to 2^(e - 127) float32. Raises `UnsupportedBundle` for the code
    255, which means "not a number"."""
    if bool((data == 255).any()):
        raise UnsupportedBundle("a scale that is not a number")
    # 2^-127 is below float32's normal range, so the exponent field alone cannot say it.
    bits = data.int() << 23
    return torch.where(data == 0, torch.tensor(1 << 22, dtype=torch.int32), bits).view(
        torch.float32
    )


def e4m3(data: Tensor) -> Tensor:
    """Bytes [...] as float8_e4m3fn to float32."""
    return data.view(torch.float8_e4m3fn).float()


def scaled(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """weight [N, K] times one scale for each block of it, in float32, rounded once to bfloat16.

    weight: float8 or integers; scale: [ceil(N / rows), ceil(K / columns)] float32 for blocks of
    (rows, columns).
    """
    n, k = weight.shape
    out = torch.empty(n, k, dtype=torch.bfloat16)
    for rows in slab_rows(n, k):
        factors = scale[torch.arange(rows.start, rows.stop) // block[0]]
        factors = factors.repeat_interleave(block[1], dim=1)[:, :k]
        out[rows] = weight[rows].float() * factors
    return out
