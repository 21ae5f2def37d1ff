"""Freed memory that the C library and the CUDA allocator keep, and giving it back."""

from __future__ import annotations

import torch

from osaurus.kernels.malloc import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, glibc

#: Bytes a CUDA allocator may hold unused before a purge gives them back.
CUDA_UNUSED_RESERVE = 512 << 20


def keep_heap_pages() -> None:
    """Let freed activations stay mapped for the next forward, process-wide.

    By default glibc returns blocks of some megabytes to the system at once, and every
    prefill forward pays for its pages again (8 ms instead of 1 for one dequantized matrix).
    `trim_heap` gives them back when the engine chooses to.
    """
    libc = glibc()
    if libc is not None:
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 512 << 20)


def trim_heap(max_unused_bytes: int | None = CUDA_UNUSED_RESERVE) -> None:
    """Return free heap pages to the system where the C library can, and a CUDA device's
    unused reserve when it is more than that, which makes it worth the pause; None keeps it."""
    if max_unused_bytes is not None and torch.cuda.is_initialized():
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if unused > max_unused_bytes:
            torch.cuda.empty_cache()
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)
