"""Causal depthwise convolution of a few taps, whose window outlives the step.

Each channel is the weighted sum of its last inputs (LFM2's short convolution, arXiv:2511.23404;
the one before a gated delta rule, arXiv:2412.06464). One multiplication and one addition a
tap, oldest first: a row's bits know neither its company nor where its prompt was cut.

Letters: T rows, S slots, C channels, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    window: Tensor,
    slots: Tensor,
    q_start: Sequence[int],
) -> Tensor:
    """Convolve the rows of each slot, going on where its window stands.

    x: [T, C] float32, the rows of slot `slots[s]` at q_start[s] .. q_start[s + 1]; taps: [C, K]
    float32, oldest first; bias: [C] float32; window: [all slots, C, K - 1] float32, the last
    inputs, oldest first, updated in place. Returns [T, C] float32.
    """
    if x.shape[0] == len(q_start) - 1:  # one row each
        inputs = torch.cat([window.index_select(0, slots), x.unsqueeze(-1)], dim=-1)
        window.index_copy_(0, slots, inputs[..., 1:])
        return _weighted(inputs.unbind(-1), taps, bias)
    parts: list[Tensor] = []
    for slot, (start, end) in zip(slots.tolist(), pairwise(q_start), strict=True):
        inputs = torch.cat([window[slot].t(), x[start:end]])
        count = end - start
        window[slot].copy_(inputs[count:].t())
        shifted = [inputs[tap : tap + count] for tap in range(taps.shape[1])]
        parts.append(_weighted(shifted, taps, bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _weighted(inputs: Sequence[Tensor], taps: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of inputs[k] [N, C] times taps[:, k]."""
    total = inputs[0] * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        total.add_(inputs[tap] * taps[:, tap])
    return total if bias is None else total.add_(bias)


def short_conv_reference(x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """The oracle: torch's convolution in float64 over one whole sequence, x [T, C]."""
    padded = F.pad(x.double().t(), (taps.shape[1] - 1, 0)).unsqueeze(0)
    weight = taps.double().unsqueeze(1)
    out = F.conv1d(padded, weight, None if bias is None else bias.double(), groups=x.shape[1])
    return out[0].t()
