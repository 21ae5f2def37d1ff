"""Which residents make room for a model that is to be loaded. Decides; takes nothing down."""

from __future__ import annotations

from collections.abc import Mapping

from osaurus.types.runtime import EvictionPolicy


def victims(
    policy: EvictionPolicy,
    resident_bytes: Mapping[str, int],
    *,
    incoming_bytes: int,
    limit_bytes: int,
) -> list[str]:
    """Ids of `resident_bytes`, in the order in which they should go.

    Strict: all of them. Manual: the largest first, until the rest and the newcomer are within
    `limit_bytes`. (Two of 6 and 3 GB, 4 GB incoming, limit 8: the 6 go, the 3 may stay.)
    """
    by_size = sorted(resident_bytes, key=lambda name: (-resident_bytes[name], name))
    if policy == "strict_single_model":
        return by_size
    total = sum(resident_bytes.values()) + incoming_bytes
    chosen: list[str] = []
    for name in by_size:
        if total <= limit_bytes:
            break
        total -= resident_bytes[name]
        chosen.append(name)
    return chosen
