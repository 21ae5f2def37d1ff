"""What older files and the original's own store become, each once.

A file that names the steps it has been through (`migrations`), or no version at all, since then
a person wrote it, is left as it is: a later choice of an old value is a choice.
"""

from __future__ import annotations

import json
import plistlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from osaurus.errors import InvalidField
from osaurus.settings.fields import Setting
from osaurus.settings.files import Document, find, with_value, without_value
from osaurus.settings.keys import seal
from osaurus.settings.schema import BY_KEY, INITIAL, SCHEMA_VERSION

#: Where the original kept the size of a batch before the file existed.
RETIRED_BATCH_KEY = "ai.osaurus.scheduler.mlxBatchEngineMaxBatchSize"
MAX_CONCURRENT = 32

_PREFERENCES = "Library/Preferences/com.dinoki.osaurus.plist"


def migrate(document: Mapping[str, Any]) -> tuple[Document, list[str]]:
    """The document as this version writes it, and one line for each thing that changed."""
    changed, notices = _with_sealed_keys(deepcopy(dict(document)))
    version = changed.get("schemaVersion")
    if not isinstance(version, int) or "migrations" in changed:
        return changed, notices
    for _, below, notice, step in _STEPS:
        if version < below and (found := step(changed)) is not None:
            changed = found
            notices.append(notice)
    changed["schemaVersion"] = max(version, SCHEMA_VERSION)
    changed["migrations"] = _names()
    return changed, notices


def _with_sealed_keys(document: Document) -> tuple[Document, list[str]]:
    """A key that a person wrote into the file stays there as its hash only. Not once but
    whenever: a new one may be written over it."""
    notices: list[str] = []
    for setting in BY_KEY.values():
        has, value = find(document, setting.path)
        if setting.is_secret and has and isinstance(value, str) and value != seal(value):
            document = with_value(document, setting.path, seal(value))
            notices.append(f"{setting.key} is now kept as its hash")
    return document, notices


def _flat_disk_size(document: Document) -> Document | None:
    key = ("cache", "blockDisk", "maxSizeGB")
    return without_value(document, key) if find(document, key) == (True, 10) else None


def _disk_share(document: Document) -> Document | None:
    key = ("cache", "blockDisk", "maxSizePercent")
    has, value = find(document, key)
    return with_value(document, key, 10.0) if has and value != 10.0 else None


def _implicit_prefix_share(document: Document) -> Document | None:
    key = ("cache", "prefix", "memoryPercent")
    return without_value(document, key) if find(document, key) == (True, 15) else None


def _paged_default(document: Document) -> Document | None:
    """Neither of the original's two defaults was a choice; here the memory tier costs nothing."""
    key = ("cache", "pagedKV", "enabled")
    return without_value(document, key) if find(document, key)[0] else None


def _speculation_off(document: Document) -> Document | None:
    key = ("mtp", "mode")
    if find(document, ("mtp", "user_chose"))[1] is True or find(document, key) != (True, "off"):
        return None
    return with_value(document, key, "family_default")


_Step = Callable[[Document], Document | None]

#: Name, the first version that has it, what to say, what it does. The last three were never
#: tied to a version.
_STEPS: tuple[tuple[str, int, str, _Step], ...] = (
    ("disk-size", 2, "a disk cache of 10 GB became the automatic size", _flat_disk_size),
    ("disk-share", 3, "the disk cache's share became 10 %", _disk_share),
    ("prefix-share", 99, "the implied 15 % for prefixes were unset", _implicit_prefix_share),
    ("paged-cache", 99, "the implied setting of the paged cache was unset", _paged_default),
    ("speculation", 99, "speculation that was off by default follows the family", _speculation_off),
)


def _names() -> list[str]:
    return [name for name, *_ in _STEPS]


def first_document(legacy: Mapping[str, Any] | None = None) -> Document:
    """What a new file says; `legacy` is what `read_legacy` found.

    Never asked again once there is a file, also not when settings are reset. A value that is
    no legal one is left out.
    """
    document = deepcopy(dict(INITIAL))
    legacy = legacy or {}
    size = legacy.get(RETIRED_BATCH_KEY)
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        key = ("concurrency", "maxConcurrentSequences")
        document = with_value(document, key, min(size, MAX_CONCURRENT))
    for old, setting, default in _LEGACY:
        value = legacy.get(old)
        if value is not None and value != default and _is_legal(setting, value):
            document = with_value(document, setting.path, value)
    residency = legacy.get("modelIdleResidencyPolicy")
    for setting in (BY_KEY["residency.mode"], BY_KEY["residency.seconds"]):
        value = residency.get(setting.path[-1]) if isinstance(residency, Mapping) else None
        if setting.range and isinstance(value, int | float):
            value = min(setting.range.high, max(setting.range.low, value))
        if value is not None and _is_legal(setting, value):
            document = with_value(document, setting.path, value)
    if legacy.get("exposeToNetwork") is True:
        document = with_value(document, BY_KEY["network.host"].path, "0.0.0.0")
    document["migrations"] = _names()
    return document


#: Key of the original's `server.json`, where it goes, the old default that means "not set".
_LEGACY = (
    ("port", BY_KEY["network.port"], 1337),
    ("exposeToNetwork", BY_KEY["network.expose"], False),
    ("allowedOrigins", BY_KEY["network.corsOrigins"], []),
    ("genTopP", BY_KEY["generation.topP"], 1.0),
    ("modelEvictionPolicy", BY_KEY["residency.evictionPolicy"], None),
    ("modelLoadRAMSoftThreshold", BY_KEY["residency.loadRAMSoftThreshold"], 0.80),
    ("modelLoadRAMHardThreshold", BY_KEY["residency.loadRAMHardThreshold"], 0.90),
)


def _is_legal(setting: Setting, value: Any) -> bool:
    try:
        setting.check(value)
    except InvalidField:
        return False
    return True


def read_legacy(config_dir: Path, user_home: Path) -> dict[str, Any]:
    """What the original left on this machine: its `server.json` beside our file, and the
    preferences of the app on macOS. Unreadable means absent."""
    found: dict[str, Any] = {}
    for path, read in (
        (config_dir / "server.json", json.loads),
        (user_home / _PREFERENCES, plistlib.loads),
    ):
        try:
            content = read(path.read_bytes())
        except (OSError, ValueError, RecursionError, plistlib.InvalidFileException):
            continue
        if isinstance(content, dict):
            found |= content
    return found
