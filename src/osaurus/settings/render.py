"""The settings as rows for people, resolved for one model: the same for every face.

Pure. A row shows what holds and who says so; one that the model has taken out of the user's
hands is not enabled and says why. No row offers what nothing heeds.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from osaurus.settings.capacity import capacity_of
from osaurus.settings.load import Settings
from osaurus.settings.profiles import PROFILES
from osaurus.settings.schema import SETTINGS
from osaurus.types.sampling import SamplingParams

Source = Literal["settings", "profile", "bundle", "engine"]

_SAMPLING = {
    "temperature": "generation.temperature",
    "top_p": "generation.topP",
    "top_k": "generation.topK",
    "min_p": "generation.minP",
    "repetition_penalty": "generation.repetitionPenalty",
    "max_tokens": "generation.maxTokens",
}
_ENGINES = {one.name: one.default for one in fields(SamplingParams)}
#: Keys that only some models heed, and flags for which a pooled cache has no use.
_NOT_FOR_POOLS = ("cache.liveKVCodec", "cache.pagedKV.blockSize")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMeta:
    """What is known of the model that the rows are for. `has_pool`: layers that keep compressed
    pools (DeepSeek V4). `block_tokens` is the loaded engine's, None before a load; `memory` the
    plan's summary; `capacity` the number that `auto` resolved to."""

    model_id: str = ""
    has_pool: bool = False
    block_tokens: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    memory: str = ""
    capacity: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    id: str
    label: str
    value: str
    source: Source
    enabled: bool = True
    reason: str = ""


def render_settings(settings: Settings, model: ModelMeta | None = None) -> list[Row]:
    """In the order in which they are shown."""
    model = model or ModelMeta()
    rows = [_capacity_row(settings, model), *_cache_rows(settings, model)]
    rows += [_sampling_row(settings, model, name) for name in _SAMPLING]
    rows.append(_residency_row(settings))
    mode = settings["memorySafety.mode"]
    rows.append(
        Row(
            id="memory",
            label="Memory",
            value=f"{mode}; {model.memory}" if model.memory else mode,
            source=_source(settings, "memorySafety.mode"),
        )
    )
    rows.append(
        Row(
            id="speculation",
            label="Speculation",
            value="off",
            source="engine",
            enabled=False,
            reason="no drafter runs yet",
        )
    )
    rows.append(
        Row(
            id="compiled_decode",
            label="Compiled decoding",
            value="off",
            source="engine",
            enabled=False,
            reason="decoding runs the kernels as they are",
        )
    )
    return rows


def _capacity_row(settings: Settings, model: ModelMeta) -> Row:
    found = capacity_of(settings)
    value = str(found.requests)
    if found.requests == "auto" and model.capacity is not None:
        value = f"auto: {model.capacity}"
    is_profiles = found.reason.startswith("the profile")
    return Row(
        id="concurrency",
        label="Concurrent sessions",
        value=value,
        source="profile" if is_profiles else "settings",
        reason=found.reason,
    )


def _cache_rows(settings: Settings, model: ModelMeta) -> list[Row]:
    rows: list[Row] = []
    if model.has_pool:
        rows.append(
            Row(
                id="native_cache",
                label="Cache",
                value="the model's own: compressed pools beside a window of exact tokens",
                source="bundle",
                enabled=False,
                reason="the model's layers decide what they keep",
            )
        )
    locked = "the model's pools are kept as it computes them" if model.has_pool else ""
    rows.append(
        Row(
            id="kv_codec",
            label="Keys and values",
            value="as computed" if model.has_pool else settings["cache.liveKVCodec"],
            source="bundle" if model.has_pool else _source(settings, "cache.liveKVCodec"),
            enabled=not model.has_pool,
            reason=locked,
        )
    )
    if model.has_pool:
        rows.append(
            Row(
                id="pool_quant",
                label="Pools",
                value="as computed",
                source="bundle",
                enabled=False,
                reason=locked,
            )
        )
    rows.append(_block_row(settings, model))
    keeps = settings["cache.pagedKV.enabled"]
    reuses = settings["cache.prefix.enabled"]
    is_kept = reuses and keeps is not False and settings["memorySafety.mode"] != "strict"
    rows.append(
        Row(
            id="prefix_memory",
            label="Prompts in memory",
            value=_prefix_size(settings) if is_kept else "dropped when a request ends",
            source=_source(settings, "cache.prefix.memoryLimitMB", "cache.prefix.memoryPercent"),
        )
    )
    on_disk = reuses and settings["cache.blockDisk.enabled"]
    on_disk = on_disk and settings["cache.storedKVCodec"] != "disabled"
    rows.append(
        Row(
            id="prefix_disk",
            label="Prompts on disk",
            value=_disk_size(settings) if on_disk else "none",
            source=_source(
                settings,
                "cache.blockDisk.enabled",
                "cache.blockDisk.maxSizePercent",
                "cache.blockDisk.maxSizeGB",
            ),
        )
    )
    return rows


def _block_row(settings: Settings, model: ModelMeta) -> Row:
    wanted = settings["cache.pagedKV.blockSize"]
    value = str(model.block_tokens or wanted or 32)
    if model.has_pool and model.block_tokens is None:
        value = "the model's"
    return Row(
        id="paged_block_size",
        label="Tokens in a block",
        value=value,
        source="bundle" if model.has_pool else _source(settings, "cache.pagedKV.blockSize"),
        enabled=not model.has_pool,
        reason="the model's layers fix it" if model.has_pool else "",
    )


def _prefix_size(settings: Settings) -> str:
    if (megabytes := settings["cache.prefix.memoryLimitMB"]) is not None:
        return f"{megabytes:g} MB"
    percent = settings["cache.prefix.memoryPercent"]
    if percent is None:
        percent = 100 * PROFILES[settings["memorySafety.mode"]].prefix_share
    return f"{percent:g} % of the memory"


def _disk_size(settings: Settings) -> str:
    if (percent := settings["cache.blockDisk.maxSizePercent"]) is not None:
        return f"{percent:g} % of the volume"
    if (size := settings["cache.blockDisk.maxSizeGB"]) is not None:
        return f"{size:g} GB"
    return "10 % of the volume, at least 10 GB"


def _sampling_row(settings: Settings, model: ModelMeta, name: str) -> Row:
    key, source = _SAMPLING[name], "engine"
    value: Any = _ENGINES[name]
    if name in model.sampling:
        value, source = model.sampling[name], "bundle"
    if settings[key] is not None:
        value, source = settings[key], "settings"
    unset = "the room left in the context" if name == "max_tokens" else "off"
    return Row(
        id=name,
        label=name.replace("_", " ").capitalize(),
        value=unset if value is None else f"{value:g}",
        source=source,
    )


def _residency_row(settings: Settings) -> Row:
    mode = settings["residency.mode"]
    value = {
        "immediately": "unloaded at once",
        "never": "stays loaded",
        "after_seconds": f"unloaded after {settings['residency.seconds']:g} s",
    }[mode]
    return Row(
        id="residency",
        label="Idle models",
        value=value,
        source=_source(settings, "residency.mode", "residency.seconds"),
    )


def _source(settings: Settings, *keys: str) -> Source:
    said = any(settings.origin(key) != "default" for key in keys)
    return "settings" if said else "engine"


def preview_command(settings: Settings, model: ModelMeta | None = None) -> list[str]:
    """The `osaurus serve` that would run the same without a settings file. What a flag cannot
    say, or the model would ignore, is left out."""
    model = model or ModelMeta()
    words = ["osaurus", "serve", *([model.model_id] if model.model_id else [])]
    for setting in SETTINGS:
        value = settings[setting.key]
        is_heeded = not (model.has_pool and setting.key in _NOT_FOR_POOLS)
        if not setting.flag or value == setting.default or value is None or not is_heeded:
            continue
        if setting.key == "cache.liveKVCodec":
            value = _kv_mode(settings)
        if setting.kind == "switch":
            words.append(setting.flag)
        elif setting.kind == "texts":
            for each in value:
                words += [setting.flag, each]
        else:
            words += [setting.flag, str(value)]
    if "--no-disk-cache" in words and "--kv-cache-dir" in words:
        place = words.index("--kv-cache-dir")
        del words[place : place + 2]
    return words


def _kv_mode(settings: Settings) -> str:
    codec = settings["cache.liveKVCodec"]
    if codec != "turboquant":
        return codec
    bits = (settings["cache.turboQuantKeyBits"], settings["cache.turboQuantValueBits"])
    return "turbo({},{})".format(*bits)


def shell_line(words: list[str]) -> str:
    return shlex.join(words)
