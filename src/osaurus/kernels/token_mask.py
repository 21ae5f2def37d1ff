"""A row of logits without the tokens that a packed mask forbids: 32 tokens a word, lowest first.

Most masks allow either a few tokens or nearly all, so on the host the shorter list is written
token by token: filling a row by flags takes ten times as long. An accelerator unpacks the words
itself, and only those travel to it.

Letters: W words of a mask, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Mask = NDArray[np.int32]


def keep_allowed(row: Tensor, mask: Mask) -> Tensor:
    """row: [V] float32, not mutated; mask: [W] int32 on the host. Returns [V] with minus infinity
    where the mask has no bit; what lies beyond the mask is forbidden."""
    return _by_lists(row, mask) if row.device.type == "cpu" else _by_flags(row, mask)


def _by_lists(row: Tensor, mask: Mask) -> Tensor:
    size = row.numel()
    # Words are little-endian in memory wherever torch runs.
    flags = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[:size]
    if 2 * np.count_nonzero(flags) < flags.size:
        ids = torch.from_numpy(np.flatnonzero(flags))
        kept = torch.full_like(row, float("-inf"))
        kept[ids] = row[ids]
        return kept
    kept = row.clone()
    kept[torch.from_numpy(np.flatnonzero(flags == 0))] = float("-inf")
    kept[flags.size :] = float("-inf")
    return kept


def _by_flags(row: Tensor, mask: Mask) -> Tensor:
    words = torch.from_numpy(np.ascontiguousarray(mask)).to(row.device)
    bits = torch.arange(32, dtype=torch.int32, device=row.device)
    flags = ((words.unsqueeze(-1) >> bits) & 1).bool().flatten()[: row.numel()]
    kept = torch.full_like(row, float("-inf"))
    kept[: flags.numel()] = row[: flags.numel()].masked_fill(~flags, float("-inf"))
    return kept


def allows(mask: Mask, token_id: int) -> bool:
    """Whether the mask has the token's bit."""
    word = token_id >> 5
    return 0 <= word < mask.size and bool((int(mask[word]) >> (token_id & 31)) & 1)
