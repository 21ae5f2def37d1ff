"""Weights in the native kernels' form: one arithmetic for any number of rows.

Letters: N output features, K input features, G groups of a row, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from osaurus.kernels.cpu import has_amx
from osaurus.kernels.linear import gemm_dtype, matmul_many
from osaurus.kernels.native.matrix import GROUP_SIZES, NativeMatrix, can_hold
from osaurus.quant.grouped import GroupedWeight, UndecodedWeight, slab_rows


class NativeLinear:
    """A grouped weight, or one in plain bfloat16, as a native matrix (CPU).

    Decode, verify and prefill rows take the same kernel, so a row has the same bits in all of
    them. Where the processor multiplies matrices in tiles (AMX), prefill rows take torch's dense
    product instead, which is several times faster there.
    """

    def __init__(self, matrix: NativeMatrix) -> None:
        self.matrix = matrix
        self.out_features, self.in_features = matrix.n, matrix.k

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        if not has_amx() or num_small == x.shape[0]:
            return self.matrix.linear(x, x.dtype)
        large = self._large(x[num_small:])
        return torch.cat([self.matrix.linear(x[:num_small], x.dtype), large])

    def _large(self, x: Tensor) -> Tensor:
        weight = self.rows(torch.arange(self.out_features)).to(gemm_dtype())
        out = matmul_many(x.to(weight.dtype), weight.t()).to(x.dtype)
        return out if self.matrix.bias is None else out + self.matrix.bias.to(x.dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Output features [R] dequantized at the file's scale precision: [R, K] float32."""
        return self.matrix.rows(index)


def can_be_native(weight: GroupedWeight | UndecodedWeight | Tensor) -> bool:
    """Whether native kernels are here and take the weight. An `order` is the caller's affair."""
    if weight.device.type != "cpu":
        return False
    n, k = weight.shape
    if isinstance(weight, Tensor):
        # A hollow one (see quant/dense.py) is only looked at.
        return weight.dtype == torch.bfloat16 and any(weight.stride()) and can_hold(n, k)
    size = _group_size(weight.group_size)
    return size is not None and weight.bits <= 8 and can_hold(n, k, size)


def _group_size(size: int) -> int | None:
    return next((own for own in GROUP_SIZES if size % own == 0), None)


def native_linear(
    weight: GroupedWeight | UndecodedWeight | Tensor, bias: Tensor | None = None
) -> NativeLinear:
    """Only for weights that `can_be_native` accepts."""
    if isinstance(weight, Tensor):
        n, k = weight.shape
        return NativeLinear(plain_matrix((n, k), weight.__getitem__, bias))
    return NativeLinear(_grouped(weight, bias, can_leave_offsets=True))


def plain_matrix(
    shape: tuple[int, int], read: Callable[[slice], Tensor], bias: Tensor | None = None
) -> NativeMatrix:
    """[N, K] in bfloat16 from rows that are read a slab at a time; only for shapes that
    `can_hold` accepts."""
    matrix = NativeMatrix(*shape, 16, bias=bias)
    for rows in slab_rows(*shape):
        matrix.fill_dense(rows.start, read(rows))
    return matrix


def _grouped(
    weight: GroupedWeight | UndecodedWeight, bias: Tensor | None, *, can_leave_offsets: bool
) -> NativeMatrix:
    """Offsets that are the same number of scales everywhere are not stored: the first slab
    says whether it looks like that."""
    size = _group_size(weight.group_size)
    assert size is not None
    middle = float(1 << (weight.bits - 1))
    matrix, centre, start = None, None, 0
    for slab in weight.slabs():
        slab = slab.with_group_size(size)
        is_centred = torch.equal(slab.bias.float(), -middle * slab.scale.float())
        if matrix is None:
            centre = middle if is_centred and can_leave_offsets else None
            alike = centre is not None or slab.scale.dtype == slab.bias.dtype
            matrix = NativeMatrix(
                *weight.shape,
                4 if weight.bits <= 4 else 8,
                group=size,
                scale_dtype=slab.scale.dtype if alike else torch.float32,
                centre=centre,
                bias=bias,
            )
        elif centre is not None and not is_centred:
            return _grouped(weight, bias, can_leave_offsets=False)
        offset = slab.bias if centre is None else None
        matrix.fill_codes(start, slab.codes, slab.scale, offset)
        start += slab.shape[0]
    assert matrix is not None  # a weight has rows
    return matrix
