"""Freed memory that the C library and the CUDA allocator keep, and giving it back."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch

#: Bytes a CUDA allocator may hold unused before a purge gives them back.
CUDA_UNUSED_RESERVE = 512 << 20

#: mallopt parameters, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@cache
def _libc() -> ctypes.CDLL | None:
    """glibc, whose malloc can be tuned; None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def keep_heap_pages() -> None:
    """Let freed activations stay mapped for the next forward, process-wide.

    By default glibc returns blocks of some megabytes to the system at once, and every
    prefill forward pays for its pages again (8 ms instead of 1 for one dequantized matrix).
    `trim_heap` gives them back when the engine chooses to.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 512 << 20)


def trim_heap(max_unused_bytes: int | None = CUDA_UNUSED_RESERVE) -> None:
    """Return free heap pages to the system where the C library can, and a CUDA device's
    unused reserve when it is more than that, which makes it worth the pause; None keeps it."""
    if max_unused_bytes is not None and torch.cuda.is_initialized():
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if unused > max_unused_bytes:
            torch.cuda.empty_cache()
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
