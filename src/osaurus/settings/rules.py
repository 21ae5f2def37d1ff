"""What several settings must hold together. Errors keep a document from being saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from osaurus.errors import InvalidField


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    field: str
    severity: Literal["error", "warning"]
    message: str


def find_issues(settings: Mapping[str, Any]) -> list[Issue]:
    """Pure; in the order of the schema."""
    issues: list[Issue] = []

    def refuse(key: str, message: str) -> None:
        issues.append(Issue(field=key, severity="error", message=message))

    def warn(key: str, message: str) -> None:
        issues.append(Issue(field=key, severity="warning", message=message))

    bits = ("cache.turboQuantKeyBits", "cache.turboQuantValueBits")
    if settings["cache.liveKVCodec"] == "turboquant":
        for key in bits:
            if settings[key] is None:
                refuse(key, "turboquant needs it: set it to 2 to 8, or cache.liveKVCodec to native")
    if settings["cache.pagedKV.enabled"] and settings["cache.legacyDisk.enabled"]:
        refuse(
            "cache.legacyDisk.enabled",
            "cannot be combined with cache.pagedKV.enabled; switch one of them off",
        )
    reuses = settings["cache.prefix.enabled"] or settings["cache.blockDisk.enabled"]
    if reuses and not settings["multimodal.requireMediaSaltForCache"]:
        refuse(
            "multimodal.requireMediaSaltForCache",
            "must be true while prompts are reused: equal text with other pictures is not equal",
        )
    light, deep = settings["power.lightSleepAfterSeconds"], settings["power.deepSleepAfterSeconds"]
    if light is not None and deep is not None and deep <= light:
        refuse("power.deepSleepAfterSeconds", f"must be more than the light sleep's {light}")
    for key in ("mtp.keepDraftCacheSeparate", "mtp.acceptedTokensOnlyEnterBaseCache"):
        if not settings[key]:
            refuse(key, "must be true: drafted tokens may be wrong")
    if not settings["concurrency.continuousBatching"] and reuses:
        warn(
            "concurrency.continuousBatching",
            "is off while prompts are reused: requests wait for each other and gain little",
        )
    steps = settings["generation.diffusionMaxDenoisingSteps"]
    if steps is not None and steps < 12:
        warn(
            "generation.diffusionMaxDenoisingSteps", f"{steps} steps give poor answers; 12 or more"
        )
    return issues


def check_together(settings: Mapping[str, Any]) -> None:
    """Raises `InvalidField` for the first error."""
    for issue in find_issues(settings):
        if issue.severity == "error":
            raise InvalidField(issue.field, issue.message)
