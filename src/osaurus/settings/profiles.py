"""The memory-safety profiles: what each allows, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from osaurus.types.cache import MemoryProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`load_fraction` of the memory may be used by a loaded model, None for all of it.
    `allocator_cache_bytes` is what an accelerator's allocator may hold unused, None for any.
    `prefix_share` of the machine's memory may hold prefixes that nobody uses. A load that does
    not fit, or whose size is not known, is only warned of unless the profile refuses."""

    load_fraction: float | None
    allocator_cache_bytes: int | None
    concurrency: int
    prefix_share: float
    default_max_kv_size: int | None
    refuses: bool = False


PROFILES: Mapping[MemoryProfile, Profile] = {
    "performance": Profile(
        load_fraction=0.90,
        allocator_cache_bytes=None,
        concurrency=2,
        prefix_share=0.20,
        default_max_kv_size=131072,
    ),
    "balanced": Profile(
        load_fraction=0.75,
        allocator_cache_bytes=1 << 30,
        concurrency=2,
        prefix_share=0.15,
        default_max_kv_size=65536,
    ),
    "safe_auto": Profile(
        load_fraction=0.70,
        allocator_cache_bytes=128 << 20,
        concurrency=1,
        prefix_share=0.15,
        default_max_kv_size=65536,
    ),
    "strict": Profile(
        load_fraction=0.60,
        allocator_cache_bytes=128 << 20,
        concurrency=1,
        prefix_share=0.10,
        default_max_kv_size=16384,
        refuses=True,
    ),
    "diagnostic_dangerous": Profile(
        load_fraction=None,
        allocator_cache_bytes=None,
        concurrency=1,
        prefix_share=1.0,
        default_max_kv_size=None,
    ),
}

#: The profiles as the positions of a slider, 0 first.
SLIDER: tuple[MemoryProfile, ...] = tuple(PROFILES)
