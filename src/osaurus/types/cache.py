"""What the KV cache is told and what it tells: settings, a request's hints, counters.

Sizes are bytes, lengths are tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

KVKind = Literal["none", "engine_selected", "turbo", "affine"]
MemoryProfile = Literal["performance", "balanced", "safe_auto", "strict", "diagnostic_dangerous"]

_MODE = re.compile(r"(turbo|affine)\(\s*(\d+)\s*,\s*(\d+)\s*\)")


@dataclass(frozen=True, slots=True)
class KVMode:
    """How older blocks are kept in memory.

    `none`: as computed. `turbo(key_bits, value_bits)`: TurboQuant, each 2 to 8.
    `affine(bits, group)`: affine codes, 4 or 8 bits in groups of 32 or 64.
    `engine_selected`: TurboQuant 3/3 where a model is proven for it, else `none`.
    """

    kind: KVKind = "none"
    first: int = 0
    second: int = 0

    def __post_init__(self) -> None:
        if self.kind == "turbo" and not (2 <= self.first <= 8 and 2 <= self.second <= 8):
            raise ValueError(f"kv mode {self}: key and value bits must be 2 to 8")
        if self.kind == "affine" and (self.first not in (4, 8) or self.second not in (32, 64)):
            raise ValueError(f"kv mode {self}: bits must be 4 or 8 and the group 32 or 64")

    @classmethod
    def parse(cls, text: str) -> KVMode:
        """Raises ValueError that names what may be written."""
        word = text.strip().lower()
        if word == "none":
            return cls("none")
        if word == "engine_selected":
            return cls("engine_selected")
        found = _MODE.fullmatch(word)
        if found is None:
            raise ValueError(
                f"kv mode {text!r}: write none, engine_selected, turbo(3,3) or affine(8,64)"
            )
        kind: KVKind = "turbo" if found.group(1) == "turbo" else "affine"
        return cls(kind, int(found.group(2)), int(found.group(3)))

    def __str__(self) -> str:
        coded = self.kind in ("turbo", "affine")
        return f"{self.kind}({self.first},{self.second})" if coded else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of one model's cache, resolved by the runtime.

    `use_paged_cache` "off" drops blocks when their request ends. `disk_dir` None keeps
    nothing on disk; `disk_max_percent` is a share of the volume's capacity, `disk_max_gb` the
    older absolute form. `kv_mode` is the default of requests that name none.
    `default_max_kv_size` and `long_prompt_multiplier` are the rotating cap of very long
    prompts. Recurrent layers keep `recurrent_entries` snapshots in memory, one every
    `snapshot_interval` tokens of a prompt; `rederive` recomputes missing ones when idle.
    `reuse_generated` lets a later prompt take over keys and values that decoding made.
    Prefixes that nobody uses fill `prefix_max_bytes` at most, else `prefix_percent` of the
    machine's memory, else the share of `memory_profile`; with `prefix_ttl_s` one goes that
    long after its last use.
    """

    use_paged_cache: Literal["off", "auto", "on"] = "auto"
    disk_dir: Path | None = None
    disk_max_percent: float | None = None
    disk_max_gb: float | None = None
    kv_mode: KVMode = field(default_factory=lambda: KVMode("engine_selected"))
    default_max_kv_size: int | None = 65536
    long_prompt_multiplier: float = 2.0
    recurrent_entries: int = 50
    snapshot_interval: int = 512
    rederive: bool = True
    reuse_generated: bool = True
    memory_profile: MemoryProfile = "safe_auto"
    prefix_max_bytes: int | None = None
    prefix_percent: float | None = None
    prefix_ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHints:
    """What a request knows about its own prefix.

    `scope_salt` names the settings that change how the same tokens are meant, `media_salt` is
    a digest of pictures and sound (None without any). The first `stable_tokens` of the
    prompt are its system part and tools, which other prompts are likely to share.
    """

    scope_salt: str = ""
    media_salt: bytes | None = None
    stable_tokens: int = 0
    kv_mode: KVMode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """One observation of a model's cache. Counters run from the load of the model."""

    model_key: str = ""
    lookups: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    held_bytes: int = 0
    cached_bytes: int = 0
    budget_bytes: int = 0
    cached_blocks: int = 0
    evictions: int = 0
    restore_mismatches: int = 0  #: records that did not fit the live cache
    restores_without_room: int = 0
    restores_given_up: int = 0  #: reads that took too long
    store_failures: int = 0  #: stores that raised
    stores_dropped: int = 0  #: runs given up because an answer needed their blocks
    snapshots: int = 0
    snapshot_bytes: int = 0
    coded_blocks: int = 0
    coded_bytes: int = 0
    #: By kind of layer why its blocks stay exact, "" where they may be coded.
    exact_reasons: Mapping[str, str] = field(default_factory=dict)
    generated_kv: Literal["exact", "approximate", "not reused"] = "approximate"
    kv_mode: str = "none"
    #: Layers by what they remember, as observed: {"full_attention": 30}.
    topology: Mapping[str, int] = field(default_factory=dict)
    #: Counters of the disk tier by name; empty without one.
    disk: Mapping[str, int] = field(default_factory=dict)
    #: Why there is no disk tier; empty when there is one.
    disk_off: str = ""
