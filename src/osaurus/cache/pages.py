"""Storage whose pages the system commits when they are first written and takes back when
they are free: a pool may reserve its whole budget and be as large as what it holds."""

from __future__ import annotations

import mmap
from math import prod

import torch


class PagedStorage:
    """A zeroed tensor. On a CPU its pages come and go; on a device all of it is allocated."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """shape: [layers, blocks, ...]."""
        self._map: mmap.mmap | None = None
        nbytes = prod(shape) * dtype.itemsize
        if torch.device(device).type != "cpu" or nbytes == 0:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            # Private: pages of a shared mapping stay with the system when they are let go.
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(self._map, dtype=dtype).view(shape)
        self._layers, self._layer_bytes = shape[0], nbytes // max(1, shape[0])
        self._block_bytes = self._layer_bytes // max(1, shape[1])

    def give_back(self, first: int, last: int) -> int:
        """Let go of the pages of blocks [first, last), which read as zero from then on;
        returns the bytes that the system got. Pages shared with other blocks stay."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return 0
        given = 0
        for layer in range(self._layers):
            base = layer * self._layer_bytes
            start = base + first * self._block_bytes
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (base + last * self._block_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
                given += end - start
        return given


def stretches(ids: list[int]) -> list[tuple[int, int]]:
    """Ascending ids as [first, last) ranges: [3, 4, 7] is (3, 5) and (7, 8)."""
    found: list[tuple[int, int]] = []
    for block in sorted(ids):
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found
