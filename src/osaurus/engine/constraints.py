"""The grammars of a step's rows: their masks, and what else may forbid a token under one.

Bans that work on tokens (`min_tokens`, a thinking budget) count only as far as they leave
something that the grammar allows: a grammar ends when it must. Rows without a grammar are not
touched, and no row's mask depends on another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from osaurus.grammar.mask import allows
from osaurus.grammar.matcher import compute_masks
from osaurus.kernels.token_mask import best_allowed, keep_allowed
from osaurus.types.engine import Constraint, TokenRule
from osaurus.types.sampling import SamplingParams

Row = NDArray[np.int32]


class Constrained(Protocol):
    """What of a sampler counts here."""

    params: SamplingParams
    rule: TokenRule | None
    constraint: Constraint | None
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Masking:
    """`masks` are those of a step's constrained rows, by row; `faults` say which grammars
    failed."""

    masks: Mapping[int, Row] = field(default_factory=dict)
    faults: Mapping[int, Exception] = field(default_factory=dict)

    def apply(self, index: int, row: Tensor) -> Tensor:
        """Row [V] of the step's row `index`, with what is forbidden at minus infinity."""
        mask = self.masks.get(index)
        return row if mask is None else keep_allowed(row, mask)

    def best(self, index: int, row: Tensor) -> int:
        """The largest of what row [V] of the step's row `index` may choose."""
        return best_allowed(row, self.masks[index])

    def forbids(self, index: int, token_id: int) -> bool:
        mask = self.masks.get(index)
        return mask is not None and not allows(mask, token_id)


NO_MASKING = Masking()


def masking_of(
    vocab_size: int, samplers: Sequence[Constrained], num_generated: Sequence[int]
) -> Masking:
    """What the grammars of these rows forbid a model with that many logits."""
    constrained = [
        (i, sampler, sampler.constraint)
        for i, sampler in enumerate(samplers)
        if sampler.constraint is not None
    ]
    if not constrained:
        return NO_MASKING
    found = compute_masks([constraint for _, _, constraint in constrained])
    masks: dict[int, Row] = {}
    faults: dict[int, Exception] = {}
    for (i, sampler, constraint), mask in zip(constrained, found, strict=True):
        if isinstance(mask, Exception):
            faults[i] = mask
            continue
        mask = _within(mask, vocab_size)
        if mask.any():
            masks[i] = _narrowed(mask, sampler, constraint, num_generated[i])
        else:
            faults[i] = ValueError("the grammar allows no token that this model has")
    return Masking(masks, faults)


def _within(mask: Row, vocab_size: int) -> Row:
    """The mask without tokens that the model has no logits for."""
    if mask.size * 32 <= vocab_size:
        return mask
    mask = mask[: (vocab_size + 31) // 32].copy()
    if left := vocab_size % 32:
        mask[-1] &= np.int32((1 << left) - 1)
    return mask


def _narrowed(mask: Row, sampler: Constrained, constraint: Constraint, num_generated: int) -> Row:
    ends, params, rule = constraint.end_token_ids, sampler.params, sampler.rule
    # Tokens that end the answer only for this request count as its end tokens do.
    own_stops = sampler.stop_token_ids - ends
    if own_stops and not constraint.is_accepting:
        mask = _without(mask, own_stops)
    if params.ignore_eos:
        mask = _without(mask, ends)
    if num_generated < params.min_tokens:
        mask = _without(mask, sampler.stop_token_ids)
    if rule is not None:
        mask = _without(mask, rule.banned)
        if (forced := rule.forced) is not None and allows(mask, forced):
            mask = np.zeros_like(mask)
            _set(mask, forced, to=True)
    return mask


def _without(mask: Row, token_ids: Iterable[int]) -> Row:
    """`mask` less these tokens; the mask as it is where nothing would be left."""
    banned = [token for token in token_ids if allows(mask, token)]
    if not banned:
        return mask
    narrowed = mask.copy()
    for token in banned:
        _set(narrowed, token, to=False)
    return narrowed if narrowed.any() else mask


def _set(mask: Row, token_id: int, *, to: bool) -> None:
    bits = mask.view(np.uint32)
    flag = np.uint32(1 << (token_id & 31))
    word = token_id >> 5
    bits[word] = bits[word] | flag if to else bits[word] & ~flag
