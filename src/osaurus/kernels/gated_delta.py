"""The gated delta rule: a matrix a head that decays, and learns each token's value by its key.

Yang et al. 2024 (arXiv:2412.06464). A token with key k, value v, decay d = exp(g) and rate b
does S <- d S; S <- S + b k (v - k S); its answer is q S.

Prompts go by tiles of `TILE` tokens (section 3.3 there, and arXiv:2406.06484): within a tile
the corrections are one triangular system, so a tile costs a few products instead of sixteen
steps. Rounding then depends on where tiles begin. Therefore the tokens of a tile that is not
complete wait beside the matrix, and the next chunk computes their tile anew, from the same
matrix: how a prompt was cut changes no bit. The first decode row folds in what waits; decode
goes token by token.

Letters: T rows, M tiles, N tokens of a tile, K key heads, H value heads
(a multiple of K; G = H / K), Dk, Dv head dims. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.kernels.elementwise import exp
from osaurus.kernels.products import batched_product

#: Tokens of a tile. Larger ones wait in larger buffers, smaller ones take more products.
TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRows:
    """What tokens bring. `log_decay` is at most 0, `rate` in 0 .. 1; `q` is scaled."""

    q: Tensor  # [T, K, Dk]
    k: Tensor  # [T, K, Dk]
    v: Tensor  # [T, H, Dv]
    log_decay: Tensor  # [T, H]
    rate: Tensor  # [T, H]

    def select(self, rows: Tensor | slice) -> DeltaRows:
        return DeltaRows(
            q=self.q[rows],
            k=self.k[rows],
            v=self.v[rows],
            log_decay=self.log_decay[rows],
            rate=self.rate[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaState:
    """All slots' state, updated in place: the matrix before the tokens that wait, those tokens
    (keys, values, log decays, rates side by side; zeros where there are none), their number."""

    matrix: Tensor  # [slots, H, Dk, Dv]
    waiting: Tensor  # [slots, TILE - 1, K * Dk + H * Dv + 2 * H]
    num_waiting: Tensor  # [slots, 1]


def waiting_shape(key_heads: int, value_heads: int, k_dim: int, v_dim: int) -> tuple[int, int]:
    """The shape of one slot's `waiting`."""
    return TILE - 1, key_heads * k_dim + value_heads * (v_dim + 2)


def gated_delta(
    rows: DeltaRows, state: DeltaState, slots: Tensor, q_start: Sequence[int], num_small: int
) -> Tensor:
    """The answers [T, H, Dv] of each slot's rows, whose tokens its state absorbs.

    The rows of slot `slots[s]` are q_start[s] .. q_start[s + 1]; with `num_small` all are decode
    rows, else all are prefill rows.
    """
    if num_small:
        return _decode(rows, state, slots, q_start)
    parts = [
        _prefill(rows.select(slice(start, end)), state, slot)
        for slot, (start, end) in zip(slots.tolist(), pairwise(q_start), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(rows: DeltaRows, state: DeltaState, slots: Tensor, q_start: Sequence[int]) -> Tensor:
    """Token by token, each slot by itself: its matrix stays in the processor's cache, and its
    products have one shape whoever else takes the step."""
    held = state.num_waiting.index_select(0, slots).flatten().tolist()
    q, k = _by_value_head(rows.q, rows), _by_value_head(rows.k, rows)
    kept = exp(rows.log_decay).unsqueeze(-1)  # [T, H, 1]
    rate, own = rows.rate.unsqueeze(-1), (q * k).sum(-1, keepdim=True)
    pair = torch.stack([q, k], dim=2)  # [T, H, 2, Dk]
    out = torch.empty_like(rows.v)
    for slot, count, (start, end) in zip(slots.tolist(), held, pairwise(q_start), strict=True):
        if count:
            _fold_waiting(state, slot, int(count), rows.q[:0])
        for row in range(start, end):
            # A copy: a product may depend on how its operand is aligned.
            matrix = state.matrix[slot].clone()
            read = batched_product(pair[row], matrix) * kept[row].unsqueeze(-1)
            asked, known = read.unbind(1)
            told = rate[row] * (rows.v[row] - known)
            written = k[row].unsqueeze(-1) * told.unsqueeze(-2)
            torch.add(matrix.mul_(kept[row].unsqueeze(-1)), written, out=state.matrix[slot])
            out[row] = asked + own[row] * told
    return out


def _by_value_head(x: Tensor, rows: DeltaRows) -> Tensor:
    """x [rows or tiles, K, ...], each key head repeated for the value heads that it serves."""
    group = rows.v.shape[1] // rows.k.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _prefill(rows: DeltaRows, state: DeltaState, slot: int) -> Tensor:
    """One slot's chunk; what is left of its last tile waits."""
    held = int(state.num_waiting[slot])
    packed = [rows.k.flatten(1), rows.v.flatten(1), rows.log_decay, rows.rate]
    whole = torch.cat([state.waiting[slot, :held], torch.cat(packed, dim=-1)])
    complete = whole.shape[0] // TILE
    matrix = state.matrix[slot].clone()
    out, matrix = _tiles(_unpack(whole, rows.q, matrix), matrix, complete)
    left = whole[complete * TILE :]
    state.matrix[slot].copy_(matrix)
    state.waiting[slot].zero_()
    state.waiting[slot, : left.shape[0]] = left
    state.num_waiting[slot] = left.shape[0]
    return out[held:]


def _fold_waiting(state: DeltaState, slot: int, count: int, no_queries: Tensor) -> None:
    """Absorb what waits; `no_queries` is [0, K, Dk]."""
    matrix = state.matrix[slot].clone()
    waiting = _unpack(state.waiting[slot, :count], no_queries, matrix)
    state.matrix[slot].copy_(_tiles(waiting, matrix, 1)[1])
    state.waiting[slot].zero_()
    state.num_waiting[slot] = 0


def _unpack(packed: Tensor, q: Tensor, matrix: Tensor) -> DeltaRows:
    """Tokens as they wait. `q` are the queries of the last ones; the others, answered before,
    ask zeros."""
    (heads, k_dim, v_dim), key_heads = matrix.shape, q.shape[1]
    k, v, log_decay, rate = packed.split([key_heads * k_dim, heads * v_dim, heads, heads], dim=-1)
    return DeltaRows(
        q=F.pad(q, (0, 0, 0, 0, packed.shape[0] - q.shape[0], 0)),
        k=k.unflatten(-1, (key_heads, k_dim)),
        v=v.unflatten(-1, (heads, v_dim)),
        log_decay=log_decay,
        rate=rate,
    )


def _tiles(rows: DeltaRows, matrix: Tensor, absorbed: int) -> tuple[Tensor, Tensor]:
    """Answers [T, H, Dv] of tokens whose first tile begins at `matrix` [H, Dk, Dv], and the
    matrix after the first `absorbed` tiles.

    The last tile is filled up with tokens of key, value, rate and log decay 0, which change
    nothing. All products have the shapes of whole tiles.
    """
    count, heads, v_dim = rows.v.shape
    tiles = -(-count // TILE)
    q, k, v = (_by_tile(x, tiles) for x in (rows.q, rows.k, rows.v))
    rate = _by_tile(rows.rate.unsqueeze(-1), tiles)  # [M, H, N, 1]
    # In double: differences of large sums.
    total = _by_tile(rows.log_decay.unsqueeze(-1), tiles).double().cumsum(dim=2)
    later = torch.ones(TILE, TILE, dtype=torch.bool, device=k.device).triu(1)
    between = (total - total.transpose(2, 3)).masked_fill(later, float("-inf"))
    fade = exp(between.float())  # [M, H, N, N]: what is left at i of what j wrote
    since_start = exp(total.float())  # [M, H, N, 1]
    until_end = exp((total[:, :, -1:] - total).float())

    both = torch.cat([k, q], dim=2)  # [M, K, 2 N, Dk]
    near = batched_product(both.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    near = _by_value_head(near.view(tiles, -1, 2 * TILE, TILE), rows)
    solve = _inverse((near[:, :, :TILE] * fade * rate).tril(-1))
    attend = near[:, :, TILE:] * fade
    both, k = _by_value_head(both, rows), _by_value_head(k, rows)
    carried = (k * until_end).transpose(2, 3).contiguous()

    parts: list[Tensor] = []
    for tile in range(tiles):
        read = batched_product(both[tile], matrix)  # [H, 2 N, Dv]
        known, asked = since_start[tile] * read[:, :TILE], since_start[tile] * read[:, TILE:]
        told = batched_product(solve[tile], rate[tile] * (v[tile] - known))
        parts.append(asked + batched_product(attend[tile], told))
        if tile < absorbed:
            written = batched_product(carried[tile], told)
            matrix = (matrix * since_start[tile, :, -1:]).add_(written)
    out = torch.stack(parts).transpose(1, 2).reshape(tiles * TILE, heads, v_dim)
    return out[:count], matrix


def _by_tile(x: Tensor, tiles: int) -> Tensor:
    """[T, heads, D] to [M, heads, N, D], zeros after the last token."""
    padded = F.pad(x, (0, 0, 0, 0, 0, tiles * TILE - x.shape[0]))
    return padded.view(tiles, TILE, *x.shape[1:]).transpose(1, 2).contiguous()


def _inverse(lower: Tensor) -> Tensor:
    """(1 + L)^-1 of strictly lower triangular L [..., N, N], by forward substitution: rows
    know only what is above them, and keys that repeat (L near one) lose no digits."""
    inverse = torch.eye(TILE, device=lower.device).expand_as(lower).contiguous()
    for i in range(1, TILE):
        above = lower[..., i, :i].unsqueeze(-1) * inverse[..., :i, :i]
        inverse[..., i, :i] = -above.sum(-2)
    return inverse


def gated_delta_reference(rows: DeltaRows, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The oracle: token by token, in the inputs' own precision. matrix: [H, Dk, Dv]; returns
    ([T, H, Dv], the matrix after the last token)."""
    q, k = _by_value_head(rows.q, rows), _by_value_head(rows.k, rows)
    out = torch.empty_like(rows.v)
    for t in range(out.shape[0]):
        matrix = matrix * rows.log_decay[t].exp()[:, None, None]
        missed = rows.v[t] - torch.einsum("hk,hkv->hv", k[t], matrix)
        told = rows.rate[t].unsqueeze(-1) * missed
        matrix = matrix + k[t].unsqueeze(-1) * told.unsqueeze(-2)
        out[t] = torch.einsum("hk,hkv->hv", q[t], matrix)
    return out, matrix
