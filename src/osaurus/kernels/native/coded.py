"""Attention's two sums over TurboQuant's blocks, natively: scores of rotated queries and weighted
sums of values, where the codes lie. The torch forms are the codec's `keys` and `values` times
queries and weights (topology/codecs/turboquant.py, kernels/coded_attention.py).

Letters: T rows, K kv heads, Q query heads of one, P (row, block) pairs, Dr the width of rotated
queries.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.kernels.native.library import library, native

#: A block's weights lie on the stack.
_MAX_BLOCK_TOKENS = 256


class _BlocksStruct(ctypes.Structure):
    """`CodedBlocks` of codes.h."""

    _fields_ = (
        ("block_bytes", ctypes.c_int64),
        ("block_tokens", ctypes.c_int32),
        ("k_dim", ctypes.c_int32),
        ("v_dim", ctypes.c_int32),
        ("k_bits", ctypes.c_int32),
        ("v_bits", ctypes.c_int32),
        ("has_signs", ctypes.c_int32),
        ("k_codes_at", ctypes.c_int32),
        ("k_norm_at", ctypes.c_int32),
        ("v_codes_at", ctypes.c_int32),
        ("v_norm_at", ctypes.c_int32),
        ("k_signs_at", ctypes.c_int32),
        ("k_rest_at", ctypes.c_int32),
        ("k_levels", ctypes.c_void_p),
        ("v_levels", ctypes.c_void_p),
    )


class NativeCodes:
    """One codec's blocks [block, K, bytes], described once."""

    def __init__(
        self,
        k_levels: Tensor,
        v_levels: Tensor,
        *,
        k_dim: int,
        v_dim: int,
        block_tokens: int,
        block_bytes: int,
        at: dict[str, int],
    ) -> None:
        """k_levels, v_levels: [2^b] float32 on the host; at: where in a block the codec's fields
        begin, by name, `k_signs` and `k_rest` where keys have them."""
        # Sixteen at least: a lookup reads that many at once.
        self._levels = [F.pad(t, (0, max(0, 16 - t.numel()))) for t in (k_levels, v_levels)]
        self._struct = _BlocksStruct(
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            k_dim=k_dim,
            v_dim=v_dim,
            k_bits=k_levels.numel().bit_length() - 1,
            v_bits=v_levels.numel().bit_length() - 1,
            has_signs=int("k_signs" in at),
            k_levels=self._levels[0].data_ptr(),
            v_levels=self._levels[1].data_ptr(),
            **{f"{name}_at": start for name, start in at.items()},
        )

    def scores(
        self, storage: Tensor, pair_block: Tensor, pair_row: Tensor, queries: Tensor, out: Tensor
    ) -> None:
        """storage: [block, K, bytes] uint8; pair_block, pair_row: [P] int64; queries:
        [T, K, Q, Dr] float32. Fills out [P, K, Q, block tokens]."""
        queries = queries.contiguous()
        library().osaurus_coded_scores(
            ctypes.addressof(self._struct),
            storage.data_ptr(),
            pair_block.data_ptr(),
            pair_row.data_ptr(),
            pair_block.numel(),
            queries.shape[1],
            queries.shape[2],
            queries.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def sums(self, storage: Tensor, pair_block: Tensor, weights: Tensor, out: Tensor) -> None:
        """weights: [P, K, Q, block tokens] float32. Fills out [P, K, Q, Dv]."""
        library().osaurus_coded_sums(
            ctypes.addressof(self._struct),
            storage.data_ptr(),
            pair_block.data_ptr(),
            pair_block.numel(),
            weights.shape[1],
            weights.shape[2],
            weights.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )


def can_read(device: torch.device, block_tokens: int) -> bool:
    """Whether the library is here and reads such blocks."""
    is_here = native().library is not None and device.type == "cpu"
    return is_here and block_tokens <= _MAX_BLOCK_TOKENS
