"""The OpenMP team that torch's CPU kernels run on, kept to one in the process.

Every thread that runs a parallel kernel keeps a team of workers for its lifetime. As soon as
libgomp counts more of them than cores, it lets all of them sleep almost at once between two
kernels: with a second team that merely exists, a decode step took 30 ms instead of 13. So
whoever is done computing for now lets its team go; the next kernel builds it anew in 0.1 ms.
Native kernels run on the same team (`team_function`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

#: OpenMP 5.2, section 18.6.1: release the pool, keep settings.
_OMP_PAUSE_SOFT = 1


@cache
def _libgomp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded; None where there is none (another OpenMP, another
    system)."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text().splitlines():
        path = line.partition("/")[2]
        if "libgomp" in path:
            return ctypes.CDLL("/" + path)
    return None


def team_function(name: str) -> Any | None:
    """A function of the OpenMP library that torch runs on; None where that is not libgomp."""
    return getattr(_libgomp(), name, None)


def release_team() -> None:
    """Let the calling thread's workers go. Call it outside any kernel, when idle. Without
    libgomp nothing is released and nothing breaks."""
    pause = team_function("omp_pause_resource_all")
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)


@contextmanager
def one_thread() -> Generator[None]:
    """The calling thread's kernels take no workers: for many short ones beside other work.
    Other threads keep their number, which torch's own setting would not grant."""
    set_threads = team_function("omp_set_num_threads")
    if set_threads is None:
        yield
        return
    before = torch.get_num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)
