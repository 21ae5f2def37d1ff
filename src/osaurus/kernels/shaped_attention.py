"""Prefill attention whose scores are capped or compete with sinks: gpt-oss, Gemma 2.

torch's scaled_dot_product_attention knows neither, so this one adds up tiles of keys in float32
(the running softmax of FlashAttention, arXiv:2205.14135). Slower than the plain form, and a
row's last bits may depend on how the prompt was cut; decode rows have their own exact form in
`paged_attention.decode_attention`.

Letters: T rows, H query heads, K kv heads, Q = H / K, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from osaurus.kernels.paged_attention import KEY_TILE, PrefillPlan

#: Where a row's running maximum starts: finite, so that a tile it may not read changes nothing.
_LOWEST = -1e30


def shaped_prefill_attention(
    q: Tensor,
    storage: Tensor,
    plan: PrefillPlan,
    k_dim: int,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of one slot's chunk; its own keys are in storage already.

    q: [T, H, Dk] float32, already scaled; `sinks` [H] float32. Returns [T, H, Dv] float32.
    """
    rows, heads, _ = q.shape
    _, kv_heads, block, width = storage.shape
    per_kv, count = heads // kv_heads, plan.blocks.numel()
    gathered = storage.index_select(0, plan.blocks).permute(1, 0, 2, 3)
    kv = gathered.reshape(kv_heads, count * block, width)[:, : plan.padded_keys]
    queries = q.view(rows, kv_heads, per_kv, k_dim).permute(1, 2, 0, 3)
    queries = queries.reshape(kv_heads, per_kv * rows, k_dim)
    if sinks is None:
        best = q.new_full((kv_heads, per_kv, rows, 1), _LOWEST)
        total = torch.zeros_like(best)
    else:
        best = sinks.view(kv_heads, per_kv, 1, 1).expand(-1, -1, rows, 1).clone()
        total = torch.ones_like(best)
    summed = q.new_zeros(kv_heads, per_kv, rows, width - k_dim)
    for start in range(0, kv.shape[1], KEY_TILE):
        tile = kv[:, start : start + KEY_TILE].float()
        scores = torch.bmm(queries, tile[..., :k_dim].transpose(1, 2))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.view(kv_heads, per_kv, rows, tile.shape[1])
        scores.masked_fill_(~plan.mask[:rows, start : start + tile.shape[1]], float("-inf"))
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        fade, weights = torch.exp(best - higher), torch.exp(scores - higher)
        values = torch.bmm(weights.view(kv_heads, per_kv * rows, -1), tile[..., k_dim:])
        total = total * fade + weights.sum(-1, keepdim=True)
        summed = summed * fade + values.view_as(summed)
        best = higher
    return (summed / total).permute(2, 0, 1, 3).reshape(rows, heads, width - k_dim)
