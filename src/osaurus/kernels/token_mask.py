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


def best_allowed(row: Tensor, mask: Mask) -> int:
    """The largest of the allowed entries of row [V], the lowest id among equals."""
    if row.device.type == "cpu" and _is_sparse(mask):
        ids = torch.from_numpy(_ids(mask, row.numel()))
        return int(ids[row[ids].argmax()])
    return int(keep_allowed(row, mask).argmax())


def _is_sparse(mask: Mask) -> bool:
    return 2 * np.count_nonzero(mask) < mask.size


def _ids(mask: Mask, vocab_size: int) -> NDArray[np.int64]:
    """The tokens of a mask in order; only the words that have any are unpacked."""
    words = np.flatnonzero(mask)
    # Words are little-endian in memory wherever torch runs.
    flags = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    places, bits = np.nonzero(flags)
    ids = words[places] * 32 + bits
    return ids[ids < vocab_size]


def _by_lists(row: Tensor, mask: Mask) -> Tensor:
    size = row.numel()
    if _is_sparse(mask):
        ids = torch.from_numpy(_ids(mask, size))
        kept = torch.full_like(row, float("-inf"))
        kept[ids] = row[ids]
        return kept
    kept = row.clone()
    kept[torch.from_numpy(_ids(~mask, size))] = float("-inf")
    kept[32 * mask.size :] = float("-inf")
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
