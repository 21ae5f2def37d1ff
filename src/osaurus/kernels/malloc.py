"""The C library's malloc, where it is one that can be told what to do. Imports no torch."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

#: mallopt parameters, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


@cache
def glibc() -> ctypes.CDLL | None:
    """None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def use_one_arena() -> None:
    """Let all threads that begin from now on allocate from one heap, process-wide.

    By default each of the first sixteen threads or so gets one of its own, of 64 MB, and
    `malloc_trim` gives back the end of the first heap only: a server whose engines come and go on
    threads of their own kept 100 MB that nobody used. Costs nothing to ask for again.
    """
    libc = glibc()
    if libc is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
