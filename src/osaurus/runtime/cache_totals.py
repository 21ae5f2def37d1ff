"""The cache counters of all models of this process, those that were unloaded among them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from osaurus.types.cache import CacheStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTotals:
    """Sums that never fall while the process runs. `disk_stores` counts records written;
    `disk_misses` are the misses of models that had a disk tier to look in."""

    lookups: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    evictions: int = 0
    disk_misses: int = 0
    disk_stores: int = 0

    @classmethod
    def of(cls, stats: CacheStats) -> CacheTotals:
        return cls(
            lookups=stats.lookups,
            memory_hits=stats.memory_hits,
            disk_hits=stats.disk_hits,
            misses=stats.misses,
            hit_tokens=stats.hit_tokens,
            prompt_tokens=stats.prompt_tokens,
            evictions=stats.evictions,
            disk_misses=0 if stats.disk_off else stats.misses,
            disk_stores=stats.disk.get("stores", 0),
        )

    def __add__(self, other: CacheTotals) -> CacheTotals:
        return CacheTotals(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            }
        )
