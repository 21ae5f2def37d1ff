"""A weight in the native kernels' form: tiles of 16 output features, codes and scales side by side.

Letters: T rows, N output features, K input features, G groups of a row.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from osaurus.kernels.native.library import library, native

#: Output features of a tile, and what K is a multiple of.
LANES = 16
#: Group sizes the kernels read, the largest first.
GROUP_SIZES = (128, 64, 32, 16)

_SCALE_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


class MatrixStruct(ctypes.Structure):
    """`Matrix` of abi.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("has_offset", ctypes.c_int32),
        ("centre", ctypes.c_float),
    )


def can_hold(n: int, k: int, group: int | None = None) -> bool:
    """Whether the library is here and takes an [n, k] matrix with that group size (None: plain
    bfloat16)."""
    fits = n > 0 and k > 0 and k % LANES == 0 and (group is None or k % group == 0)
    return fits and (group is None or group in GROUP_SIZES) and native().library is not None


class NativeMatrix:
    """W[n, k] = code * scale + offset by groups of K, or plain bfloat16 (16 bits).

    Made empty, then filled by `fill_codes` or `fill_dense` with rows in ascending pieces. Without
    offsets stored, the offset is -centre * scale. `bias` [N] is added to products.
    """

    def __init__(
        self,
        n: int,
        k: int,
        bits: int,
        *,
        group: int = 0,
        scale_dtype: torch.dtype = torch.float16,
        centre: float | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self.n, self.k, self.bits = n, k, bits
        self._scale_dtype = scale_dtype
        self.bias = None if bias is None else bias.float().contiguous()
        self.struct = MatrixStruct(
            bias=None if self.bias is None else self.bias.data_ptr(),
            n=n,
            k=k,
            bits=bits,
            group=group,
            scale_kind=_SCALE_KINDS[scale_dtype],
            has_offset=int(centre is None and bits != 16),
            centre=centre or 0.0,
        )
        self._library = library()
        # Zeros: the last tile's features past n are computed and not written.
        size = self._library.osaurus_matrix_bytes(self.address)
        self._data = torch.zeros(size, dtype=torch.uint8)
        self.struct.data = self._data.data_ptr()

    @property
    def address(self) -> int:
        """Of the struct, for programs; it lives as long as this object."""
        return ctypes.addressof(self.struct)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def is_like(self, other: NativeMatrix) -> bool:
        """Whether both have the same shape and form."""
        a, b = self.struct, other.struct
        names = ("n", "k", "bits", "group", "scale_kind", "has_offset", "centre")
        return all(getattr(a, name) == getattr(b, name) for name in names)

    @property
    def group(self) -> int:
        """Of K that has one scale; with 16 bits of no meaning."""
        return self.struct.group

    def fill_codes(self, first: int, codes: Tensor, scale: Tensor, offset: Tensor | None) -> None:
        """Rows from `first` on: codes [R, K] uint8; scale, offset [R, G], offset only where it
        is stored."""
        codes = codes.contiguous()
        scale = scale.to(self._scale_dtype).contiguous()
        offset = None if offset is None else offset.to(self._scale_dtype).contiguous()
        self._library.osaurus_pack(
            self.address,
            first,
            codes.shape[0],
            codes.data_ptr(),
            scale.data_ptr(),
            None if offset is None else offset.data_ptr(),
        )

    def fill_dense(self, first: int, weight: Tensor) -> None:
        """Rows from `first` on: weight [R, K], rounded to bfloat16."""
        weight = weight.to(torch.bfloat16).contiguous()
        self._library.osaurus_pack(
            self.address, first, weight.shape[0], weight.data_ptr(), None, None
        )

    def linear(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [T, K] bfloat16 or float32 (rounded to bfloat16) times the matrix: [T, N] in `dtype`,
        one of these two. A row's bits depend on that row alone."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.n, dtype=dtype)
        failed = self._library.osaurus_linear(
            self.address,
            x.data_ptr(),
            int(x.dtype == torch.bfloat16),
            x.shape[0],
            out.data_ptr(),
            int(dtype == torch.bfloat16),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for {x.shape[0]} rows of {self.k} and {self.n}")
        return out

    def rows(self, index: Tensor) -> Tensor:
        """Output features [R] int64: [R, K] float32, at the stored scales' precision."""
        index = index.contiguous()
        out = torch.empty(index.numel(), self.k)
        self._library.osaurus_rows(
            self.address, index.data_ptr(), index.numel(), out.data_ptr(), torch.get_num_threads()
        )
        return out
