"""Rotary position embedding, half-split form, and the published ways to stretch it.

Su et al. 2021 (arXiv:2104.09864); scaling: linear (Chen et al. 2023, arXiv:2306.15595),
"llama3" (Llama 3.1's by-part interpolation), YaRN (Peng et al. 2023, arXiv:2309.00071).

Letters: T rows, H heads, D rotary dims. Dim i pairs with dim i + D / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle

#: Positions are tabulated this many at a time, so a row's angle never depends on who asked.
TABLE_STEP = 4096


def inverse_frequencies(
    dim: int, base: float, scaling: Mapping[str, Any] | None, max_positions: int
) -> tuple[Tensor, float]:
    """Angular frequency of each pair, and the factor on cos and sin.

    Returns ([dim / 2] float32, attention factor). Raises `UnsupportedBundle` for a scaling
    type that is not known, naming it.
    """
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    if scaling is None or kind in ("default", "mrope"):
        return plain.float(), 1.0
    if kind == "linear":
        return (plain / float(scaling["factor"])).float(), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling).float(), 1.0
    if kind == "yarn":
        return _yarn(plain, dim, base, scaling, max_positions)
    raise UnsupportedBundle(f"rope_scaling type {kind!r} is not supported by native models")


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    # Turns that a pair makes over the original context decide: many turns keep their
    # frequency, few are interpolated, those between are blended.
    turns = context * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * blend + plain / factor * (1 - blend)


def _yarn(
    plain: Tensor, dim: int, base: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    context = float(scaling.get("original_max_position_embeddings") or max_positions)
    factor = float(scaling.get("factor") or max_positions / context)
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def pair_with(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_with(fast), pair_with(slow)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float64)
    interpolate = ((steps - first) / max(last - first, 0.001)).clamp(0, 1)
    frequencies = plain / factor * interpolate + plain * (1 - interpolate)

    def magnitude(scale: float, coefficient: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * coefficient * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = magnitude(factor, mscale) / magnitude(factor, mscale_all)
        else:
            attention = magnitude(factor)
    return frequencies.float(), float(attention)


class RotaryTable:
    """cos and sin by position, grown in steps of `TABLE_STEP`; owned by one model."""

    def __init__(self, frequencies: Tensor, factor: float, device: torch.device | str) -> None:
        self._frequencies = frequencies.to(device)
        self._factor = factor
        self._table = torch.empty(0, 2, 2 * frequencies.numel(), device=device)

    @property
    def dims(self) -> int:
        """Numbers of a head that are rotated."""
        return self._table.shape[2]

    def up_to(self, last: int) -> Tensor:
        """[positions, 2, D] float32 for all positions to `last` at least: cos, then signed sin."""
        while last >= self._table.shape[0]:
            self._grow()
        return self._table

    def at(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin for rows at `positions` [T] (none past `last`).

        Returns two [T, 1, D] float32 tensors; sin is negated on the first half, so that
        `x * cos + swap_halves(x) * sin` rotates.
        """
        rows = self.up_to(last).index_select(0, positions)
        return rows[:, :1], rows[:, 1:]

    def _grow(self) -> None:
        start = self._table.shape[0]
        steps = torch.arange(start, start + TABLE_STEP, device=self._table.device)
        angles = steps.float().unsqueeze(1) * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        step = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        self._table = torch.cat([self._table, step])


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first D dims of each head. x: [T, H, D or more] float32; returns the same.

    Single multiplies and adds only: each is rounded alike in vector and scalar code, so a
    row's bits do not depend on where it lies in the tensor (a complex product's do).
    """
    dim = cos.shape[-1]
    head = x if x.shape[-1] == dim else x[..., :dim]
    rotated = (head * cos).add_(head.roll(dim // 2, -1).mul_(sin))
    return rotated if x.shape[-1] == dim else torch.cat([rotated, x[..., dim:]], dim=-1)
