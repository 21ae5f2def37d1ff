"""What the settings mean to the runtime: options of a load, of residency, of sampling.

The one place where a key becomes a field of `LoadOptions`, `RuntimeSettings` or
`SamplingParams`. Imports no torch but for a CUDA device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from osaurus.errors import InvalidField
from osaurus.parsing.selection import check_overrides
from osaurus.runtime.load import LoadOptions, resolve_device
from osaurus.runtime.machine import device_memory, host_memory
from osaurus.runtime.memory import Limits, resolve_capacity
from osaurus.settings.capacity import capacity_of
from osaurus.settings.rules import check_together
from osaurus.types.cache import CacheConfig, KVMode
from osaurus.types.engine import EngineConfig
from osaurus.types.runtime import ResidencyPolicy, RuntimeSettings

MB = 10**6

#: Field of `SamplingParams` by key.
_SAMPLING = {
    "generation.maxTokens": "max_tokens",
    "generation.temperature": "temperature",
    "generation.topP": "top_p",
    "generation.topK": "top_k",
    "generation.minP": "min_p",
    "generation.repetitionPenalty": "repetition_penalty",
}
#: Words of other programs for "read none" and "ask the bundle".
_NO_PARSER = ("off", "disabled", "none")
_BUNDLES_PARSER = ("auto", "default")

_ENGINE = EngineConfig()


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises `InvalidField` for what cannot be meant, before any model is loaded."""
    check_together(settings)
    check_overrides(
        tool_override=_parser(settings["tools.toolParserOverride"]),
        reasoning_override=_parser(settings["tools.reasoningParserOverride"]),
    )
    kv_mode_of(settings)
    chat_template_of(settings)


def load_options(settings: Mapping[str, Any]) -> LoadOptions:
    """Asks the machine for its memory, which is what `auto` resolves from."""
    disk = settings["cache.blockDisk.enabled"] and settings["cache.prefix.enabled"]
    engine = EngineConfig(
        max_batch_size=capacity(settings),
        kv_budget_bytes=_megabytes(settings["performance.kvBudgetMB"]),
        kv_max_blocks=settings["cache.pagedKV.maxBlocks"],
        kv_block_tokens=settings["cache.pagedKV.blockSize"] or _ENGINE.kv_block_tokens,
        prefill_chunk_tokens=settings["concurrency.prefillStepSize"]
        or _ENGINE.prefill_chunk_tokens,
        latency_budget_ms=settings["performance.latencyBudgetMs"],
        max_context_tokens=settings["performance.maxContextTokens"],
        decode_batch_size=settings["concurrency.completionBatchSize"],
        prefill_batch_size=settings["concurrency.prefillBatchSize"],
        light_sleep_s=_sleep_after(settings, "power.lightSleepAfterSeconds"),
        threads=settings["performance.threads"],
        cache=cache_config(settings),
    )
    return LoadOptions(
        compute_mode=settings["performance.computeMode"],
        quantize=settings["performance.quantizeOnLoad"],
        device=settings["performance.device"],
        engine=engine,
        disk_cache=disk and settings["cache.storedKVCodec"] != "disabled",
        tool_format=_parser(settings["tools.toolParserOverride"]),
        reasoning_format=_parser(settings["tools.reasoningParserOverride"]),
        limits=limits_of(settings),
        fits_batch=capacity_of(settings).requests == "auto",
        served_name=settings["network.servedModelName"],
        aliases=tuple(settings["models.aliases"]),
        chat_template=chat_template_of(settings),
    )


def cache_config(settings: Mapping[str, Any]) -> CacheConfig:
    keeps = {None: "auto", True: "on", False: "off"}[settings["cache.pagedKV.enabled"]]
    directory = settings["cache.blockDisk.directory"]
    # Snapshots lie at block boundaries.
    block_tokens = settings["cache.pagedKV.blockSize"] or _ENGINE.kv_block_tokens
    interval = CacheConfig().snapshot_interval
    return replace(
        CacheConfig(),
        use_paged_cache=keeps if settings["cache.prefix.enabled"] else "off",
        disk_dir=None if directory is None else Path(directory).expanduser(),
        disk_max_percent=settings["cache.blockDisk.maxSizePercent"],
        disk_max_gb=settings["cache.blockDisk.maxSizeGB"],
        kv_mode=kv_mode_of(settings),
        snapshot_interval=max(1, interval // block_tokens) * block_tokens,
        rederive=settings["cache.enableSSMReDerive"],
        memory_profile=settings["memorySafety.mode"],
        prefix_max_bytes=_megabytes(settings["cache.prefix.memoryLimitMB"]),
        prefix_percent=settings["cache.prefix.memoryPercent"],
        prefix_ttl_s=_seconds(settings["cache.prefix.ttlMinutes"]),
    )


def chat_template_of(settings: Mapping[str, Any]) -> str | None:
    """The text of the user's own template. Raises `InvalidField` for a file that is not there."""
    key = "tools.customChatTemplate"
    given: str | None = settings[key]
    if given is None or "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(
            key, f"no template can be read from {given}: {error}; name a Jinja file"
        ) from None


def kv_mode_of(settings: Mapping[str, Any]) -> KVMode:
    codec = settings["cache.liveKVCodec"]
    if codec == "turboquant":
        bits = (settings["cache.turboQuantKeyBits"], settings["cache.turboQuantValueBits"])
        return KVMode("turbo", *bits)
    return KVMode("none") if codec == "native" else KVMode.parse(codec)


def limits_of(settings: Mapping[str, Any]) -> Limits:
    return Limits(
        mode=settings["memorySafety.mode"],
        custom_fraction=settings["memorySafety.customPhysicalMemoryFraction"],
        custom_allocator_cache_bytes=settings["memorySafety.customAllocatorCacheBytes"],
        refuses_unknown=settings["memorySafety.failClosedWhenEstimateUnknown"],
    )


def capacity(settings: Mapping[str, Any]) -> int:
    """The resolved number of requests of one model that run at the same time."""
    device = resolve_device(settings["performance.device"])
    memory = device_memory(device)
    return resolve_capacity(
        capacity_of(settings),
        limits_of(settings),
        memory or host_memory(),
        is_device=memory is not None,
    )


def runtime_settings(settings: Mapping[str, Any], *, max_concurrent: int) -> RuntimeSettings:
    return RuntimeSettings(
        eviction=settings["residency.evictionPolicy"],
        residency=_residency(settings),
        max_concurrent_sequences=max_concurrent,
        ram_soft_threshold=min(
            settings["residency.loadRAMSoftThreshold"], settings["residency.loadRAMHardThreshold"]
        ),
        degeneration_detection=settings["guardrails.degenerationDetection"],
        loads_on_request=settings["power.jitLoad"],
        wakes_on_request=settings["power.wakeOnRequest"],
        request_timeout_s=settings["network.timeoutSeconds"],
        stream_interval=settings["generation.streamInterval"],
    )


def _residency(settings: Mapping[str, Any]) -> ResidencyPolicy:
    """The policy, or deep sleep where that comes sooner."""
    policy = ResidencyPolicy(mode=settings["residency.mode"], seconds=settings["residency.seconds"])
    asleep_s = _sleep_after(settings, "power.deepSleepAfterSeconds")
    if asleep_s is None or (policy.delay_s is not None and policy.delay_s <= asleep_s):
        return policy
    return ResidencyPolicy(seconds=asleep_s)


def _sleep_after(settings: Mapping[str, Any], key: str) -> float | None:
    return settings[key] if settings["power.autoSleepEnabled"] else None


def sampling_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the user wants where a request says nothing, by field of `SamplingParams`."""
    return {field: settings[key] for key, field in _SAMPLING.items() if settings[key] is not None}


def _parser(name: str | None) -> str | None:
    """As `read_conventions` takes it: None asks the bundle."""
    if name is None or name.lower() in _BUNDLES_PARSER:
        return None
    return "none" if name.lower() in _NO_PARSER else name


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60 * minutes


def _megabytes(value: float | None) -> int | None:
    return None if value is None else int(value * MB)
