"""Mixtures of experts: which experts a row takes, and their answers added up.

Softmax routing with top-k (Shazeer et al. 2017, arXiv:1701.06538); sigmoid routing with a
bias that only chooses, within groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Rows are
grouped by expert for the products alone: a row's own experts are added in its own order, so
that whoever else chose the same expert changes no bit.

Letters: T rows, C hidden, E experts, k experts a row takes, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from osaurus.kernels.linear import linear_rows

#: (expert, rows [M, C], how many of them are small rows) -> [M, C].
Expert = Callable[[int, Tensor, int], Tensor]


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, C] any dtype, weight [E, C] float32; returns [T, E] float32.

    Row by row, also in a long prompt: a score off by one bit can choose another expert.
    """
    return linear_rows(x.float(), weight)


def route_softmax(scores: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The k likeliest experts of each row: ([T, k] int64, [T, k] float32 weights).

    With `normalize` a row's weights sum to one.
    """
    weights, experts = torch.softmax(scores, dim=-1).topk(top_k, dim=-1)
    return experts, weights / weights.sum(dim=-1, keepdim=True) if normalize else weights


def route_sigmoid(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
    least_sum: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Each expert scored by itself; `bias` [E] float32 shifts the choice, not the weights.

    Of G groups the `top_groups` with the best sum of two experts are open to a row. Returns
    ([T, k] int64, [T, k] float32 weights times `scale`); with `normalize` a row's weights are
    first divided by their sum and `least_sum`.
    """
    # In double, then rounded: exponentials of float32 differ by where a row lies in memory.
    gates = scores.double().sigmoid().float()
    choice = gates + bias
    if groups > 1:
        by_group = choice.view(choice.shape[0], groups, -1)
        best = by_group.topk(2, dim=-1).values.sum(dim=-1)
        closed = torch.ones_like(best, dtype=torch.bool)
        closed.scatter_(1, best.topk(top_groups, dim=-1).indices, False)
        choice = by_group.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
    experts = choice.topk(top_k, dim=-1).indices
    weights = gates.gather(1, experts)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + least_sum)
    return experts, weights * scale


def mix_experts(
    x: Tensor, experts: Tensor, weights: Tensor, num_small: int, apply: Expert
) -> Tensor:
    """The weighted sum of what a row's experts say of it.

    x: [T, C]; experts, weights: [T, k]; the first `num_small` rows are decode and verify rows.
    Returns [T, C] float32.
    """
    top_k = experts.shape[1]
    # Pairs (row, choice) in the order of their expert; rows stay ascending within one.
    chosen, order = experts.flatten().sort(stable=True)
    rows = order // top_k
    ids, counts = chosen.unique_consecutive(return_counts=True)
    said = x.new_empty(order.numel(), x.shape[1])
    start = 0
    for expert, count in zip(ids.tolist(), counts.tolist(), strict=True):
        mine = rows[start : start + count]
        small = int((mine < num_small).sum()) if num_small < x.shape[0] else count
        out = apply(expert, x.index_select(0, mine), small)
        said.index_copy_(0, order[start : start + count], out)
        start += count
    parts = said.view(x.shape[0], top_k, -1).float() * weights.unsqueeze(-1)
    # One choice after another: a sum over an axis may be split by its length.
    total = parts[:, 0]
    for choice in range(1, top_k):
        total = total + parts[:, choice]
    return total


def mix_experts_reference(
    x: Tensor, experts: Tensor, weights: Tensor, apply: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The oracle: row by row, in float64. `apply` maps (expert, [1, C]) to [1, C]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for expert, weight in zip(experts[row].tolist(), weights[row].tolist(), strict=True):
            out[row] += weight * apply(expert, x[row : row + 1]).double()[0]
    return out
