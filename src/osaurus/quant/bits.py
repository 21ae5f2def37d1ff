"""Codes of few bits in a row of bytes, the first in the lowest bits: the order in which MLX,
GPTQ and compressed-tensors fill their little-endian 32-bit words.

Letters: B bytes of a row, C codes of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def unpack(data: Tensor, bits: int) -> Tensor:
    """data: [..., B] uint8; returns [..., C = 8 B / bits] uint8, each 0..2^bits - 1.

    A code may lie in two bytes: of 3-bit codes, 8 fill 3 bytes. B must be whole such cycles.
    """
    if bits == 8:
        return data
    if bits == 4:
        return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    codes = 8 // math.gcd(8, bits)
    cycle = data.unflatten(-1, (-1, codes * bits // 8))
    found = []
    for i in range(codes):
        byte, shift = divmod(i * bits, 8)
        code = cycle[..., byte] >> shift
        if shift + bits > 8:
            code = code | (cycle[..., byte + 1] << (8 - shift))
        found.append(code & ((1 << bits) - 1))
    return torch.stack(found, dim=-1).flatten(-2)


def bytes_of(words: Tensor) -> Tensor:
    """[..., W] of any integer type to [..., W * itemsize] uint8, in the machine's order."""
    return words.contiguous().view(torch.uint8)
