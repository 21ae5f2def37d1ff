"""Attention over KV blocks: a ragged form for decode and verify rows, a tiled one for prefill.

Storage of one layer: [blocks, K, block, Dk + Dv], keys first. Decode follows the split form
of FlashDecoding (Dao et al. 2023) with one split a block, so that a row's sums have the same
shape and order whatever runs beside it. Prefill is torch's scaled_dot_product_attention at
padded shapes, which makes a row independent of how the prompt was cut into chunks.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) runs in its absorbed form: one kv
head, and the first `latent_dim` numbers of a key are its value too (Dv below is then that).

Letters: T rows, H query heads, K kv heads, Q = H / K, D head dim, P (row, block) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.kernels.products import batched_product

#: Prefill keys are padded to a multiple of this: the CPU kernel's own tile.
KEY_TILE = 512
#: Prefill queries are padded to a multiple of this: a lone last row would take another kernel.
QUERY_TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One slot's rows in a forward: rows [start, start + length) hold positions
    [first_position, first_position + length); `blocks` hold tokens from
    `first_block * block_tokens` on."""

    start: int
    length: int
    first_position: int
    blocks: Sequence[int]
    first_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Indices of a step's small rows for one KV group, built once for all its layers."""

    pair_block: Tensor  # [P] int64: block of each (row, block) pair
    pair_row: Tensor  # [P] int64: row of each pair, ascending
    row_pairs: Tensor  # [T] int64: pairs of each row
    hidden: Tensor  # [P, 1, 1, block] bool, True = may not read


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """One slot's chunk for one KV group."""

    blocks: Tensor  # [n] int64
    num_rows: int
    padded_keys: int
    mask: Tensor  # [padded rows, padded keys] bool, True = may read


def plan_decode(
    spans: Sequence[Span], block_tokens: int, window: int | None, device: torch.device | str
) -> DecodePlan:
    """Pairs of every row with the blocks it reads; rows in ascending order."""
    pair_block: list[int] = []
    row_pairs: list[int] = []
    starts: list[int] = []
    lasts: list[int] = []
    firsts: list[int] = []
    for span in spans:
        for position in range(span.first_position, span.first_position + span.length):
            oldest = 0 if window is None else max(0, position - window + 1)
            low, high = oldest // block_tokens, position // block_tokens + 1
            count = high - low
            pair_block += span.blocks[low - span.first_block : high - span.first_block]
            row_pairs.append(count)
            starts += range(low * block_tokens, high * block_tokens, block_tokens)
            lasts += [position] * count
            firsts += [oldest] * count
    counts = torch.tensor(row_pairs)
    slots = torch.tensor(starts).unsqueeze(1) + torch.arange(block_tokens)
    reads = slots <= torch.tensor(lasts).unsqueeze(1)
    if window is not None:
        reads &= slots >= torch.tensor(firsts).unsqueeze(1)
    return DecodePlan(
        pair_block=torch.tensor(pair_block).to(device),
        pair_row=torch.repeat_interleave(counts).to(device),
        row_pairs=counts.to(device),
        hidden=~reads[:, None, None, :].to(device),
    )


def decode_attention(
    q: Tensor,
    storage: Tensor,
    plan: DecodePlan,
    k_dim: int,
    latent_dim: int | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each row over its own blocks, in float32.

    q: [T, H, Dk] float32, already scaled. Returns [T, H, Dv] float32. `softcap` c turns a score
    s into c * tanh(s / c); `sinks` [H] float32 are scores that take weight and give no value.
    """
    rows, heads, _ = q.shape
    _, kv_heads, block, width = storage.shape
    pairs, per_kv = plan.pair_block.numel(), heads // kv_heads
    kv = storage.index_select(0, plan.pair_block).float().view(pairs * kv_heads, block, width)
    queries = q.view(rows, kv_heads, per_kv, k_dim).index_select(0, plan.pair_row)
    scores = batched_product(
        queries.view(pairs * kv_heads, per_kv, k_dim), kv[..., :k_dim].transpose(1, 2)
    )
    scores = scores.view(pairs, kv_heads, per_kv, block)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(plan.hidden, float("-inf"))
    best = _by_row(scores.amax(-1), "max", plan)
    if sinks is not None:
        best = torch.maximum(best, sinks.view(kv_heads, per_kv))
    weights = torch.exp(scores.sub_(best.index_select(0, plan.pair_row).unsqueeze(-1)))
    v_from, v_end = (k_dim, width) if latent_dim is None else (0, latent_dim)
    v_dim = v_end - v_from
    values = batched_product(weights.view(pairs * kv_heads, per_kv, block), kv[..., v_from:v_end])
    total = _by_row(weights.sum(-1), "sum", plan)
    if sinks is not None:
        # In double, then rounded: a few exponentials differ by where a row lies in memory.
        total = total + (sinks.view(kv_heads, per_kv) - best).double().exp().float()
    summed = _by_row(values.view(pairs, kv_heads, per_kv, v_dim), "sum", plan)
    return (summed / total.unsqueeze(-1)).view(rows, heads, v_dim)


def _by_row(values: Tensor, reduce: str, plan: DecodePlan) -> Tensor:
    """[P, ...] to [T, ...]. A row's blocks are added one after another, oldest first, so no
    other row changes the order. `unsafe` skips a check that the plan makes true."""
    return torch.segment_reduce(values, reduce, lengths=plan.row_pairs, axis=0, unsafe=True)


def plan_prefill(
    span: Span, block_tokens: int, window: int | None, device: torch.device | str
) -> PrefillPlan:
    """Keys start at the first block the chunk's first row reads, rounded down to KEY_TILE
    tokens, so that a key always lies at the same place in its tile."""
    end = span.first_position + span.length
    oldest = 0 if window is None else max(0, span.first_position - window + 1)
    origin = oldest // KEY_TILE * KEY_TILE
    first = max(origin // block_tokens, span.first_block)
    lead = first - origin // block_tokens
    held = span.blocks[first - span.first_block : -(-end // block_tokens) - span.first_block]
    # Blocks that left the window stand in as any block: the mask hides them.
    blocks = [held[0]] * lead + list(held)
    padded_keys = -(-(end - origin) // KEY_TILE) * KEY_TILE
    padded_rows = -(-span.length // QUERY_TILE) * QUERY_TILE
    positions = torch.arange(span.first_position, span.first_position + padded_rows)
    positions = positions.clamp_(max=end - 1).unsqueeze(1)
    slots = torch.arange(origin, origin + padded_keys)
    mask = slots <= positions
    if window is not None:
        mask &= slots > positions - window
    return PrefillPlan(
        blocks=torch.tensor(blocks).to(device),
        num_rows=span.length,
        padded_keys=padded_keys,
        mask=mask.to(device),
    )


def prefill_attention(
    q: Tensor, storage: Tensor, plan: PrefillPlan, k_dim: int, latent_dim: int | None = None
) -> Tensor:
    """Causal attention of one slot's chunk; its own keys are in storage already.

    q: [T, H, Dk] in storage's dtype, already scaled. Returns [T, H, Dv] in that dtype.
    """
    rows, heads, _ = q.shape
    _, kv_heads, block, width = storage.shape
    count = plan.blocks.numel()
    gathered = storage.index_select(0, plan.blocks).permute(1, 0, 2, 3)
    kv = storage.new_zeros(kv_heads, plan.padded_keys, width)
    tokens = min(count * block, plan.padded_keys)
    kv[:, :tokens].copy_(gathered.reshape(kv_heads, count * block, width)[:, :tokens])
    # One head size for both: with two, torch takes another path whose sums depend on shape.
    v_from, v_end = (k_dim, width) if latent_dim is None else (0, latent_dim)
    v_dim = v_end - v_from
    dim = max(k_dim, v_dim)
    padding = plan.mask.shape[0] - rows
    out = F.scaled_dot_product_attention(
        F.pad(q.transpose(0, 1), (0, dim - k_dim, 0, padding)).unsqueeze(0),
        F.pad(kv[None, ..., :k_dim], (0, dim - k_dim)),
        F.pad(kv[None, ..., v_from:v_end], (0, dim - v_dim)),
        attn_mask=plan.mask,
        scale=1.0,
        enable_gqa=heads != kv_heads,
    )
    return out[0, :, :rows, :v_dim].transpose(0, 1)


def attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, first_position: int, window: int | None
) -> Tensor:
    """The oracle of both: plain softmax attention of one slot in float64.

    q: [T, H, Dk] scaled, rows at first_position onward; keys [L, K, Dk]; values [L, K, Dv].
    Returns [T, H, Dv] float64.
    """
    rows, heads, _ = q.shape
    per_kv = heads // keys.shape[1]
    keys = keys.double().repeat_interleave(per_kv, dim=1)
    values = values.double().repeat_interleave(per_kv, dim=1)
    scores = torch.einsum("thd,lhd->htl", q.double(), keys)
    positions = torch.arange(first_position, first_position + rows).unsqueeze(1)
    slots = torch.arange(keys.shape[0])
    hidden = slots > positions
    if window is not None:
        hidden |= slots <= positions - window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("htl,lhd->thd", weights, values)
