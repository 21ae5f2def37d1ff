"""Products of bfloat16 rows with grouped 4-bit codes, and the packed form they are kept in.

Fast path: torch's `_weight_int4pack_mm_for_cpu` (float32 sums in ascending K order, each
row by itself, so a row's bits do not depend on the number of rows). Reference: unpack, then
a dense product. Knows codes, scales and groups; refuses to know file formats.

Dimension letters: M rows, N output features, K input features, G = K / group size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

#: Weights dequantized at a time: float32 temporaries of this many stay in the cache.
DEQUANTIZE_SLAB = 1 << 19

#: Group sizes that torch's packed kernel takes.
GROUP_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How torch lays 4-bit codes out on this processor: a tile of `tile` output features
    holds, for each k, `tile / 2` bytes; byte j has feature j in its low nibble and feature
    j + tile / 2 in its high one."""

    tile: int


@cache
def packed_layout() -> PackedLayout | None:
    """The layout found by packing a known matrix; None when it is none we can read back.

    torch does not publish the layout and it differs between instruction sets (64 features a
    tile with AVX-512, 32 with AVX2), so it is read off rather than assumed.
    """
    probe = torch.randint(0, 16, (128, 64), dtype=torch.uint8, generator=torch.Generator())
    try:
        packed = _pack(probe)
    except RuntimeError:
        return None
    for tile in (64, 32, 16):
        layout = PackedLayout(tile)
        if torch.equal(_unpack(packed, 128, 64, layout), probe):
            return layout
    return None


def is_available(n: int, k: int, group_size: int, device: torch.device | str = "cpu") -> bool:
    """Whether the packed kernel serves an [n, k] matrix with this group size there."""
    layout = packed_layout() if torch.device(device).type == "cpu" else None
    return (
        layout is not None
        and n % layout.tile == 0
        and group_size in GROUP_SIZES
        and k % group_size == 0
    )


def _pack(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def _unpack(packed: Tensor, n: int, k: int, layout: PackedLayout) -> Tensor:
    tiles = packed.view(n // layout.tile, k, layout.tile // 2)
    return torch.cat([tiles & 15, tiles >> 4], dim=-1).transpose(1, 2).reshape(n, k)


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes for this processor.

    codes: [N, K] uint8, each 0..15. Returns an opaque uint8 tensor of N * K / 2 bytes.
    Only for shapes that `is_available` accepts.
    """
    # Packing goes through int32; slices keep that eightfold copy small.
    rows = max(64, (1 << 22) // codes.shape[1] // 64 * 64)
    parts = [_pack(codes[i : i + rows]) for i in range(0, codes.shape[0], rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """Inverse of `pack`: [n, k] uint8 codes."""
    layout = packed_layout()
    if layout is None:
        raise RuntimeError("no packed layout on this processor")
    return _unpack(packed, n, k, layout)


def matmul(x: Tensor, packed: Tensor, group_size: int, scale_zero: Tensor) -> Tensor:
    """x @ W.T for W[n, k] = (code - 8) * scale + zero.

    x: [M, K] bfloat16, contiguous. scale_zero: [G, N, 2] bfloat16. Returns [M, N] bfloat16.
    """
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, scale_zero)


def matmul_reference(x: Tensor, packed: Tensor, group_size: int, scale_zero: Tensor) -> Tensor:
    """The same product from unpacked codes in float32; the oracle of `matmul`."""
    n, k = scale_zero.shape[1], x.shape[1]
    codes = unpack(packed, n, k).float().view(n, k // group_size, group_size)
    scale, zero = scale_zero.float().permute(2, 1, 0).unsqueeze(-1)
    weight = ((codes - 8) * scale + zero).view(n, k)
    return (x.float() @ weight.t()).to(x.dtype)


def dequantize_columns(packed: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense weight in [K, N] order, ready as the right operand of `x @ w`.

    scale, bias: [G, N] for W[n, k] = code * scale + bias. Computed in float32 and rounded
    once. The packed form is K-major within a tile, so [K, N] costs one pass, [N, K] two.
    """
    layout = packed_layout()
    if layout is None:
        raise RuntimeError("no packed layout on this processor")
    groups, n = scale.shape
    k, tile = packed.numel() * 2 // n, layout.tile
    tiles = packed.view(n // tile, groups, k // groups, tile // 2)
    scale, bias = (
        part.view(groups, n // tile, tile).transpose(0, 1).contiguous().float().unsqueeze(2)
        for part in (scale, bias)
    )
    out = torch.empty(n // tile, groups, k // groups, tile, dtype=dtype)
    step = max(1, DEQUANTIZE_SLAB // (k * tile))
    for i in range(0, n // tile, step):
        part = tiles[i : i + step]
        codes = torch.cat([part & 15, part >> 4], dim=-1).float()
        out[i : i + step] = torch.addcmul(bias[i : i + step], codes, scale[i : i + step])
    return out.view(n // tile, k, tile).transpose(0, 1).reshape(k, n)


def gather_rows(packed: Tensor, rows: Tensor, n: int, k: int) -> Tensor:
    """Codes of single output features: rows [R] int64 -> [R, k] uint8."""
    layout = packed_layout()
    if layout is None:
        raise RuntimeError("no packed layout on this processor")
    half = layout.tile // 2
    tiles = packed.view(n // layout.tile, k, half)
    lane = rows % layout.tile
    codes = tiles[rows // layout.tile, :, lane % half]
    return torch.where((lane < half).unsqueeze(1), codes & 15, codes >> 4)
