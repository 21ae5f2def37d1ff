"""How much of a volume the disk tier may use, and how much it must leave free. Bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

GB = 10**9
_DEFAULT_SHARE = 0.10
_DEFAULT_FLOOR_BYTES = 10 * GB
_FREE_SHARE = 0.01
_FREE_FLOOR_BYTES = 2 * GB


def capacity_bytes(directory: Path) -> int | None:
    """Total capacity of the volume, asked at the nearest ancestor there is; None if unknown."""
    for place in (directory, *directory.absolute().parents):
        try:
            return shutil.disk_usage(place).total
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def quota_bytes(
    directory: Path, *, max_percent: float | None = None, max_gb: float | None = None
) -> int:
    """A percentage of the capacity exactly as given, else GB, else 10 % but at least 10 GB.

    Of the capacity, not of what is free: the quota must not shrink as the volume fills. A
    capacity that cannot be read gives 10 GB.
    """
    if max_percent is None and max_gb is not None:
        return int(max_gb * GB)
    capacity = capacity_bytes(directory)
    if capacity is None:
        return _DEFAULT_FLOOR_BYTES
    if max_percent is not None:
        return int(capacity * max_percent / 100)
    return max(int(capacity * _DEFAULT_SHARE), _DEFAULT_FLOOR_BYTES)


def has_room(directory: Path, wanted_bytes: int, min_free_bytes: int | None = None) -> bool:
    """Whether the volume keeps its free space after a write of `wanted_bytes`.

    That is `min_free_bytes`, or 2 GB or 1 % of the volume, whichever is more. Raises OSError.
    """
    usage = shutil.disk_usage(directory)
    if min_free_bytes is None:
        min_free_bytes = max(_FREE_FLOOR_BYTES, int(usage.total * _FREE_SHARE))
    return usage.free - wanted_bytes >= min_free_bytes
