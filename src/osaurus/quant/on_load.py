"""Quantizing plain weights while they are loaded: 8 bits in groups of 64, or 4 bits in 32.

Round to nearest between a group's least and largest value. Scale and middle are bfloat16 from
the start, the type in which the packed product reads them, so that decode and prefill rows
compute with the very same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from osaurus.quant.grouped import GroupedWeight, slab_rows
from osaurus.types.weights import QuantizeOnLoad

#: Bits and group size of each choice.
FORMS: dict[QuantizeOnLoad, tuple[int, int]] = {"int8": (8, 64), "int4": (4, 32)}


def can_quantize(shape: tuple[int, int], choice: QuantizeOnLoad) -> bool:
    """Whether the rows are whole groups; others stay as they are."""
    return shape[1] % FORMS[choice][1] == 0


def quantize(weight: Tensor, choice: QuantizeOnLoad) -> GroupedWeight:
    """weight: [N, K] in plain numbers; K in whole groups. A group of equal values is exact as
    far as bfloat16 is. What is not finite makes a scale that is not finite."""
    bits, group = FORMS[choice]
    n, k = weight.shape
    half = 1 << (bits - 1)
    codes = torch.empty(n, k, dtype=torch.uint8)
    scale, middle = (torch.empty(n, k // group, dtype=torch.bfloat16) for _ in range(2))
    for rows in slab_rows(n, k):
        values = weight[rows].float().view(-1, k // group, group)
        least, largest = values.aminmax(dim=-1)
        scale[rows] = (largest - least) / ((1 << bits) - 1)
        middle[rows] = least + half * scale[rows].float()
        step = scale[rows].float()
        step = step.where(step > 0, 1.0).unsqueeze(-1)
        found = ((values - middle[rows].float().unsqueeze(-1)) / step + half).round()
        codes[rows] = found.clamp(0, (1 << bits) - 1).view(-1, k)
    return GroupedWeight(
        bits=bits,
        group_size=group,
        codes=codes,
        scale=scale,
        bias=middle.float() - half * scale.float(),
    )
