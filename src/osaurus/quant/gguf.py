"""GGUF block formats to grouped codes, one function each.

Source: the block structs of the GGUF format (ggml's `ggml-common.h`) and the values they stand
for. Blocks have 32 weights (Q4_0 ... Q8_0, IQ4_NL) or 256 with scales of their own for every 16
or 32 (the K formats); d, m and dmin are float16.

Letters: B blocks, G groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant.grouped import GroupedWeight

#: The 16 values of IQ4_NL's codes, to be multiplied by the block's scale.
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`block` weights lie in `block_bytes`; their codes have `bits` and share a scale by
    `group`. `read` turns blocks [B, block_bytes] uint8 into codes [B, block] uint8 and scale
    and bias [B, G]."""

    block: int
    block_bytes: int
    bits: int
    group: int
    read: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def is_quantized(encoding: str) -> bool:
    return encoding in FORMATS


def decode(encoding: str, data: Tensor, shape: tuple[int, int]) -> GroupedWeight:
    """Decode the raw bytes of one matrix.

    data: 1-D uint8, may be a read-only mapping (it is not written to). shape: (N, K).
    Raises `UnsupportedBundle` for another encoding or a K that is not whole blocks.
    """
    if encoding not in FORMATS:
        raise UnsupportedBundle(f"GGUF encoding {encoding} is not supported yet")
    form = FORMATS[encoding]
    n, k = shape
    if k % form.block:
        raise UnsupportedBundle(
            f"{encoding} rows of {k} weights are not whole blocks of {form.block}"
        )
    codes, scale, bias = form.read(data.view(-1, form.block_bytes))
    return GroupedWeight(
        bits=form.bits,
        group_size=form.group,
        codes=codes.reshape(n, k),
        scale=scale.reshape(n, -1),
        bias=bias.reshape(n, -1),
    )


def row_bytes(encoding: str, k: int) -> int:
    """Bytes of one row of k weights, which must be whole blocks."""
    form = FORMATS[encoding]
    return k // form.block * form.block_bytes


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _float16(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, -8 * scale.float()


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks[:, 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _float16(blocks, 0)
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return codes, scale, -16 * scale.float()


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Signed bytes become unsigned codes by adding 128; the bias takes it back. 128 * d
    # overflows float16 beyond d = 511; float32 holds it exactly.
    scale = _float16(blocks, 0)
    return blocks[:, 2:] ^ 128, scale, -128 * scale.float()


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # The values are not evenly spaced, so a code is the value itself, in 8 bits.
    values = torch.tensor(IQ4_NL_VALUES, dtype=torch.int16).add(128).to(torch.uint8)
    scale = _float16(blocks, 0)
    return values[_nibbles(blocks[:, 2:]).int()], scale, -128 * scale.float()


def _q2_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = blocks[:, :16]
    d, dmin = _float16(blocks, 80).float(), _float16(blocks, 82).float()
    return _planes(blocks[:, 16:80], 2), d * (scales & 15), -dmin * (scales >> 4)


def _q3_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Weight = d * scale * (low two bits - 4 where the high bit is clear) = (code - 4) * ...
    high = _planes(blocks[:, :32], 1)
    codes = _planes(blocks[:, 32:96], 2) | (high << 2)
    low, top = blocks[:, 96:104], blocks[:, 104:108]
    scales = torch.cat([low & 15, low >> 4], dim=1)
    scales = scales | torch.cat([((top >> shift) & 3) << 4 for shift in (0, 2, 4, 6)], dim=1)
    scale = _float16(blocks, 108).float() * (scales.float() - 32)
    return codes, scale, -4 * scale


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _planes(blocks[:, 16:144], 4), *_scale_and_min(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = _planes(blocks[:, 48:176], 4) | (_planes(blocks[:, 16:48], 1) << 4)
    return codes, *_scale_and_min(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Each half of the block: 64 bytes hold the low nibbles of its first and last 64 weights.
    low = blocks[:, :128].view(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], dim=2).flatten(1)
    codes = low | (_planes(blocks[:, 128:192], 2) << 4)
    scale = _float16(blocks, 208).float() * blocks[:, 192:208].view(torch.int8)
    return codes, scale, -32 * scale


def _scale_and_min(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and bias [B, 8] of Q4_K and Q5_K: d, dmin and 8 + 8 factors of 6 bits.

    12 bytes: the low 6 bits of bytes 0..3 are factors 0..3 and those of 4..7 minima 0..3; of
    factors and minima 4..7 the low nibbles share bytes 8..11 and the two high bits are the
    ones left over in bytes 0..3 and 4..7.
    """
    d, dmin = _float16(blocks, 0).float(), _float16(blocks, 2).float()
    factors, minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factors = torch.cat([factors & 63, (rest & 15) | ((factors >> 2) & 48)], dim=1)
    minima = torch.cat([minima & 63, (rest >> 4) | ((minima >> 2) & 48)], dim=1)
    return d * factors, -dmin * minima


def _float16(blocks: Tensor, at: int) -> Tensor:
    """[B, 1] float16 read from two bytes of every block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    """[B, 16] bytes to [B, 32]: weight i in the low nibble of byte i, i + 16 in the high one."""
    return torch.cat([data & 15, data >> 4], dim=1)


def _fifth_bits(data: Tensor) -> Tensor:
    """[B, 4] bytes, one bit a weight, to [B, 32] with 16 where it is set."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((data.unsqueeze(-1) >> bits) & 1).flatten(1) << 4


def _planes(data: Tensor, bits: int) -> Tensor:
    """[B, 32 R] bytes to [B, 256]: each run of 32 bytes holds 8 / bits runs of 32 weights, the
    first in the lowest bits of all its bytes."""
    runs = data.reshape(data.shape[0], -1, 1, 32)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)


#: Encoding -> its format. Every block type that is affine in groups.
FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, 4, 32, _q4_0),
    "Q4_1": BlockFormat(32, 20, 4, 32, _q4_1),
    "Q5_0": BlockFormat(32, 22, 5, 32, _q5_0),
    "Q5_1": BlockFormat(32, 24, 5, 32, _q5_1),
    "Q8_0": BlockFormat(32, 34, 8, 32, _q8_0),
    "IQ4_NL": BlockFormat(32, 18, 8, 32, _iq4_nl),
    "Q2_K": BlockFormat(256, 84, 2, 16, _q2_k),
    "Q3_K": BlockFormat(256, 110, 3, 16, _q3_k),
    "Q4_K": BlockFormat(256, 144, 4, 32, _q4_k),
    "Q5_K": BlockFormat(256, 176, 5, 32, _q5_k),
    "Q6_K": BlockFormat(256, 210, 6, 16, _q6_k),
}
