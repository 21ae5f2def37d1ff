"""The OpenMP team that torch's CPU kernels run on, kept to one in the process.

Every thread that runs a parallel kernel keeps a team of workers for its lifetime. As soon as
libgomp counts more of them than cores, it lets all of them sleep almost at once between two
kernels: with a second team that merely exists, a decode step took 30 ms instead of 13. So
whoever is done computing for now lets its team go; the next kernel builds it anew in 0.1 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

#: OpenMP 5.2, section 18.6.1: release the pool, keep settings.
_OMP_PAUSE_SOFT = 1


@cache
def _pause_resources() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the libgomp that torch has loaded; None where there is none
    (another OpenMP, another system): nothing is released there and nothing breaks."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text().splitlines():
        path = line.partition("/")[2]
        if "libgomp" in path:
            library = ctypes.CDLL("/" + path)
            return getattr(library, "omp_pause_resource_all", None)
    return None


def release_team() -> None:
    """Let the calling thread's workers go. Call it outside any kernel, when idle."""
    pause = _pause_resources()
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)
