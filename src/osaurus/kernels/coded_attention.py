"""Decode attention over a mix of exact and coded blocks.

A row's blocks are scored where they lie. Coded ones are read natively, or a tile at a time as
factors in the codec's own domain: queries are taken there once, the weighted values are summed
there and brought back once a query, and no more than one tile of them is ever floats. Rows keep
their bits in any company as in `paged_attention`: one partial sum a block, a row's own added
oldest first, exact blocks before coded ones. A row without coded blocks has the bits of
`decode_attention`.

Storage of one layer: exact [blocks, K, block, Dk + Dv], coded [blocks, K, bytes] uint8.

Letters: T rows, H query heads, K kv heads, Q = H / K, D head dim, P (row, block) pairs, N
pairs of a tile, Dr the width a codec scores keys in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from osaurus.kernels.native.coded import NativeCodes
from osaurus.kernels.paged_attention import DecodePlan, Span, attention_reference
from osaurus.kernels.products import batched_product

#: Bytes of a tile's keys or values as floats; larger ones leave the core's cache.
TILE_BYTES = 2 << 20


class CodedReader(Protocol):
    """How a codec's blocks are read. Every result depends on its own row or block alone."""

    def rotate_queries(self, q: Tensor) -> Tensor:
        """q: [T, H, Dk] float32. Returns [T, H, Dr] float32."""
        ...

    def keys(self, coded: Tensor) -> Tensor:
        """coded: [N, K, bytes] uint8. Returns [N, K, block, Dr] float32 whose products with
        `rotate_queries(q)` are those of q with the decoded keys."""
        ...

    def values(self, coded: Tensor) -> Tensor:
        """coded: [N, K, bytes] uint8. Returns [N, K, block, Dv] float32, to be summed."""
        ...

    def rotate_back(self, summed: Tensor) -> Tensor:
        """[T, H, Dv] float32, weighted sums of `values`, to those of the decoded values."""
        ...

    def decode(self, coded: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """coded: [N, K, bytes] uint8. Returns [N, K, block, Dk + Dv]."""
        ...

    def native(self) -> NativeCodes | None:
        """What takes both sums where the codes lie, in place of `keys` and `values`."""
        ...


@dataclass(frozen=True, slots=True)
class CodedStorage:
    """One layer's coded blocks and how they are read."""

    blocks: Tensor  # [blocks, K, bytes] uint8
    reader: CodedReader


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedPlan:
    """Indices of a step's small rows for one KV group, some of whose blocks are coded."""

    exact: DecodePlan
    pair_block: Tensor  # [P] int64: coded block of each (row, coded block) pair
    pair_row: Tensor  # [P] int64: row of each pair, ascending
    row_pairs: Tensor  # [T] int64: coded pairs of each row, possibly none


def coded_id(block: int) -> int:
    """The id of a coded block in its storage as it stands in a block table, and back: ids
    from 0 on name exact blocks, ids below 0 coded ones."""
    return ~block


def plan_coded(
    spans: Sequence[Span], block_tokens: int, device: torch.device | str
) -> CodedPlan | DecodePlan:
    """As `plan_decode` without a window; `Span.blocks` may hold `coded_id`s.

    A coded block is full and older than every row that reads it. Returns a plain `DecodePlan`
    when no row reads a coded block. Raises ValueError when a row would be written into one.
    """
    exact: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    lasts: list[int] = []
    coded: list[np.ndarray] = []
    for span in spans:
        ids = np.asarray(span.blocks, dtype=np.int64)
        is_exact = ids >= 0
        for position in range(span.first_position, span.first_position + span.length):
            end = position // block_tokens + 1
            if not is_exact[end - 1]:
                raise ValueError(f"position {position} lies in a coded block")
            kept = np.flatnonzero(is_exact[:end])
            exact.append(ids[kept])
            starts.append(kept * block_tokens)
            lasts.append(position)
            coded.append(~ids[:end][~is_exact[:end]])
    row_exact = torch.tensor([row.size for row in exact])
    row_coded = torch.tensor([row.size for row in coded])
    slots = torch.from_numpy(np.concatenate(starts)).unsqueeze(1) + torch.arange(block_tokens)
    hidden = slots > torch.tensor(lasts).repeat_interleave(row_exact).unsqueeze(1)
    plan = DecodePlan(
        pair_block=torch.from_numpy(np.concatenate(exact)).to(device),
        pair_row=torch.repeat_interleave(row_exact).to(device),
        row_pairs=row_exact.to(device),
        hidden=hidden[:, None, None, :].to(device),
    )
    if not row_coded.any():
        return plan
    return CodedPlan(
        exact=plan,
        pair_block=torch.from_numpy(np.concatenate(coded)).to(device),
        pair_row=torch.repeat_interleave(row_coded).to(device),
        row_pairs=row_coded.to(device),
    )


def coded_attention(
    q: Tensor, storage: Tensor, coded: CodedStorage, plan: CodedPlan, k_dim: int
) -> Tensor:
    """Softmax attention of each row over its own blocks, in float32.

    q: [T, H, Dk] float32, already scaled; storage and coded: one layer's. Returns
    [T, H, Dv] float32.
    """
    exact = _Part(ExactReader(k_dim), storage, storage.shape, k_dim, plan.exact)
    packed = _Part(coded.reader, coded.blocks, storage.shape, k_dim, plan)
    exact_scores, packed_scores = exact.score(q), packed.score(q)
    best = torch.maximum(exact.best(exact_scores), packed.best(packed_scores))
    exact_total, exact_summed = exact.weigh(exact_scores, best)
    packed_total, packed_summed = packed.weigh(packed_scores, best)
    return (exact_summed + packed_summed) / (exact_total + packed_total).view(*q.shape[:2], 1)


class ExactReader:
    """Blocks as computed, read as a codec's are."""

    def __init__(self, k_dim: int) -> None:
        self._k_dim = k_dim

    def rotate_queries(self, q: Tensor) -> Tensor:
        return q

    def keys(self, coded: Tensor) -> Tensor:
        return coded[..., : self._k_dim].float()

    def values(self, coded: Tensor) -> Tensor:
        return coded[..., self._k_dim :].float()

    def rotate_back(self, summed: Tensor) -> Tensor:
        return summed

    def decode(self, coded: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return coded.to(dtype)

    def native(self) -> NativeCodes | None:
        return None


class _Part:
    """All pairs whose blocks lie in one storage and are read in one way."""

    def __init__(
        self,
        reader: CodedReader,
        storage: Tensor,
        shape: torch.Size,
        k_dim: int,
        plan: CodedPlan | DecodePlan,
    ) -> None:
        """shape: [blocks, K, block, Dk + Dv] of the exact storage."""
        self._reader, self._storage, self._plan = reader, storage, plan
        self._native = reader.native() if storage.is_contiguous() else None
        self._kv_heads, self._block, self._v_dim = shape[1], shape[2], shape[3] - k_dim
        # Coded blocks are full and older than their readers: nothing to hide.
        self._hidden = plan.hidden if isinstance(plan, DecodePlan) else None

    def _tiles(self, width: int) -> Iterator[slice]:
        pairs = self._plan.pair_block.numel()
        size = max(1, TILE_BYTES // (4 * self._kv_heads * self._block * width))
        return (slice(first, first + size) for first in range(0, pairs, size))

    def _read(self, part: slice) -> Tensor:
        return self._storage.index_select(0, self._plan.pair_block[part])

    def score(self, q: Tensor) -> Tensor:
        """[T, H, Dk] to the scores of every pair [P, K, Q, block]."""
        rows, heads, _ = q.shape
        per_kv, pairs = heads // self._kv_heads, self._plan.pair_block.numel()
        queries = self._reader.rotate_queries(q).view(rows, self._kv_heads, per_kv, -1)
        scores = q.new_empty(pairs, self._kv_heads, per_kv, self._block)
        if self._native is not None:
            blocks, rows_of = self._plan.pair_block, self._plan.pair_row
            self._native.scores(self._storage, blocks, rows_of, queries, scores)
            return scores
        for part in self._tiles(queries.shape[-1]):
            keys = self._reader.keys(self._read(part)).flatten(0, 1)
            asked = queries.index_select(0, self._plan.pair_row[part]).flatten(0, 1)
            batched_product(asked, keys.transpose(1, 2), out=scores[part].flatten(0, 1))
        return scores if self._hidden is None else scores.masked_fill_(self._hidden, -torch.inf)

    def best(self, scores: Tensor) -> Tensor:
        """[T, K, Q], -inf for a row without pairs."""
        return self._by_row(scores.amax(-1), "max")

    def weigh(self, scores: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's sum of weights [T, K, Q] and of weighted values [T, H, Dv], both zero for
        a row without pairs. Overwrites scores."""
        pairs, kv_heads, per_kv, _ = scores.shape
        weights = torch.exp(scores.sub_(best.index_select(0, self._plan.pair_row).unsqueeze(-1)))
        summed = scores.new_empty(pairs, kv_heads, per_kv, self._v_dim)
        if self._native is not None:
            self._native.sums(self._storage, self._plan.pair_block, weights, summed)
        else:
            self._sum_tiles(weights, summed)
        by_row = self._by_row(summed, "sum").view(-1, kv_heads * per_kv, self._v_dim)
        return self._by_row(weights.sum(-1), "sum"), self._reader.rotate_back(by_row)

    def _sum_tiles(self, weights: Tensor, summed: Tensor) -> None:
        for part in self._tiles(self._v_dim):
            values = self._reader.values(self._read(part)).flatten(0, 1)
            batched_product(weights[part].flatten(0, 1), values, out=summed[part].flatten(0, 1))

    def _by_row(self, values: Tensor, reduce: str) -> Tensor:
        """As in `paged_attention`: a row's pairs are taken one after another."""
        lengths = self._plan.row_pairs
        return torch.segment_reduce(values, reduce, lengths=lengths, axis=0, unsafe=True)


def coded_attention_reference(
    q: Tensor, storage: Tensor, coded: CodedStorage, span: Span, k_dim: int
) -> Tensor:
    """The slow twin for one span: decode every block, then plain attention in float64.

    q: [T, H, Dk] scaled, the span's rows. Returns [T, H, Dv] float64.
    """
    parts = [
        storage[block].float()
        if block >= 0
        else coded.reader.decode(coded.blocks[None, coded_id(block)])[0]
        for block in span.blocks
    ]
    kv = torch.cat(parts, dim=1).transpose(0, 1)[: span.first_position + span.length]
    return attention_reference(q, kv[..., :k_dim], kv[..., k_dim:], span.first_position, None)
