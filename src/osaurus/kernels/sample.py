"""Keyed Gumbel noise: the randomness of sampling as a function of (seed, position, token).

Sampling a token as argmax(log p + G) with Gumbel noise G draws from p (Gumbel-max, Maddison
et al. 2014, arXiv:1411.0030). Keying G makes the draw independent of batch, order, device
and speculation. The hash is splitmix64's finaliser (Steele et al. 2014) over a counter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_MUL1, _MUL2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MUL1) & _MASK
    value = ((value ^ (value >> 27)) * _MUL2) & _MASK
    return value ^ (value >> 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's on int64 is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _signed(_MUL1)
    value = (value ^ _shift(value, 27)) * _signed(_MUL2)
    return value ^ _shift(value, 31)


def noise_key(seed: int, position: int) -> int:
    """What a token's number is hashed with, unsigned."""
    return _mix_int(_mix_int(seed + _WEYL) + position * _WEYL)


def gumbel_noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """One standard Gumbel value for each token.

    token_ids: [N] int64. Returns [N] float64; equal arguments give equal values everywhere.
    """
    hashed = _mix(token_ids * _signed(_WEYL) + _signed(noise_key(seed, position)))
    uniform = (_shift(hashed, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of scores [V] and their ids, descending, the lower id first among
    equals also where only some of these are taken: `topk` promises neither."""
    values, ids = scores.topk(count)
    least = values[-1]
    above = ids[values > least].sort().values
    equal = (scores == least).nonzero().squeeze(1)[: count - above.numel()]
    ids = torch.cat([above, equal])
    values, order = scores[ids].sort(descending=True, stable=True)
    return values, ids[order]
