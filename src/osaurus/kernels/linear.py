"""Dense products whose rows do not depend on the number of rows.

Measured with torch: on a CPU, bfloat16 `F.linear` gives a row the same bits at every M for
K <= 4096, and beyond that at any one fixed M; float32 gives them only row by row (with many
threads even the place in a fixed M matters). On CUDA a fixed M of 16 was exact throughout.
"""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows of the fixed-size product that few rows are padded to.
CPU_ROW_GROUP, CUDA_ROW_GROUP = 8, 16
#: Rows that a float32 product of prefill rows has at least: of 9 to 11 rows, two threads leave
#: one of them so few that it takes another kernel.
FLOAT_ROW_GROUP = 16
#: Above this K, bfloat16 products of one row and of several differ in the last bit.
MAX_ROW_EXACT_K = 4096


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for decode and verify rows; each row's bits are those it has alone.

    x: [M, K]; weight: [N, K] of the same dtype; returns [M, N].
    """
    m, k = x.shape
    on_cpu = x.device.type == "cpu"
    if on_cpu and x.dtype == torch.bfloat16 and k <= MAX_ROW_EXACT_K:
        return F.linear(at_least(x, CPU_ROW_GROUP), weight, bias)[:m]
    if on_cpu and x.dtype == torch.float32:
        # A copy of the row: a kernel may treat rows by how their address is aligned.
        return torch.cat([F.linear(row.clone(), weight, bias) for row in x.split(1)])
    group = CPU_ROW_GROUP if on_cpu else CUDA_ROW_GROUP
    padding = -m % group
    padded = F.pad(x, (0, 0, 0, padding)) if padding else x
    groups = [F.linear(part, weight, bias) for part in padded.split(group)]
    return (groups[0] if len(groups) == 1 else torch.cat(groups))[:m]


def at_least(x: Tensor, rows: int) -> Tensor:
    """x [M, K] with zero rows added below until there are `rows` of them."""
    return x if x.shape[0] >= rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))


def matmul_many(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] @ weight [K, N] for prefill rows: a short last chunk, padded, keeps to the
    kernel of a long one, so that where a prompt was cut changes no bit."""
    least = FLOAT_ROW_GROUP if x.dtype == torch.float32 else CPU_ROW_GROUP
    return (at_least(x, least) @ weight)[: x.shape[0]]


def linear_heads(x: Tensor, weight: Tensor, num_small: int) -> Tensor:
    """Each head's rows through that head's own matrix, as `linear_rows` and `matmul_many` do
    for one: the first `num_small` rows are decode and verify rows.

    x: [M, H, K]; weight: [H, K, N] of the same dtype; returns [M, H, N].
    """
    parts = [_small_heads(x[:num_small], weight)] if num_small else []
    if num_small < x.shape[0]:
        parts.append(_heads(x[num_small:], weight, CPU_ROW_GROUP))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _small_heads(x: Tensor, weight: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.shape[2] <= MAX_ROW_EXACT_K:
        return _heads(x, weight, CPU_ROW_GROUP)
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.cat([_heads(row, weight, 1) for row in x.split(1)])
    group = CPU_ROW_GROUP if x.device.type == "cpu" else CUDA_ROW_GROUP
    return torch.cat([_heads(part, weight, group) for part in x.split(group)])


def _heads(x: Tensor, weight: Tensor, least: int) -> Tensor:
    """One batched product over the heads, of `least` rows or more."""
    padding = max(0, least - x.shape[0])
    rows = F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1).contiguous()
    return torch.bmm(rows, weight)[:, : x.shape[0]].transpose(0, 1)


@cache
def gemm_dtype() -> torch.dtype:
    """The dtype in which this CPU multiplies large matrices fastest.

    bfloat16 where the processor has instructions for it; elsewhere the quicker of bfloat16
    and float32 on one 256 x 1024 x 1024 product.
    """
    from osaurus.kernels.cpu import has_bfloat16_products

    if has_bfloat16_products():
        return torch.bfloat16
    took: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        F.linear(x, w)
        start = time.perf_counter()
        F.linear(x, w)
        took[dtype] = time.perf_counter() - start
    return min(took, key=lambda dtype: took[dtype])
