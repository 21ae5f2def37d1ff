"""Packed token masks to one flag a token: 32 tokens a word, the lowest bit first.

Letters: L rows, W words of a mask, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def allowed_tokens(masks: NDArray[np.int32], vocab_size: int, device: torch.device) -> Tensor:
    """masks: [L, W] int32 on the host. Returns [L, V] bool on `device`; what lies beyond the
    masks is not allowed. Only the packed form travels to an accelerator."""
    masks = masks[:, : (vocab_size + 31) // 32]
    allowed = _on_host(masks) if device.type == "cpu" else _on_device(masks, device)
    missing = vocab_size - allowed.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(allowed, (0, missing), value=False)
    return allowed[:, :vocab_size]


def _on_host(masks: NDArray[np.int32]) -> Tensor:
    # Words are little-endian in memory wherever torch runs.
    octets = np.ascontiguousarray(masks).view(np.uint8)
    return torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little")).view(torch.bool)


def _on_device(masks: NDArray[np.int32], device: torch.device) -> Tensor:
    words = torch.from_numpy(np.ascontiguousarray(masks)).to(device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    return ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(1)
