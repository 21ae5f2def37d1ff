"""How many requests of one model run at the same time: the one authority.

The file's value decides, `auto` where it says so; the machine's part of `auto` is known only
when a model is loaded (`runtime/memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from osaurus.settings.profiles import PROFILES

MAX_CONCURRENT = 32
#: The most that `auto` takes, by kind of device.
MAX_AUTO_CPU, MAX_AUTO_ACCELERATOR = 8, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """`requests` is a number or `auto`; `reason` names the setting that says so."""

    requests: int | Literal["auto"]
    reason: str

    def limit(self, *, on_accelerator: bool) -> int:
        """The most requests of one model, whatever the model."""
        if self.requests != "auto":
            return self.requests
        return MAX_AUTO_ACCELERATOR if on_accelerator else MAX_AUTO_CPU


def capacity_of(settings: Mapping[str, Any]) -> Capacity:
    """Batching off is 1; then the custom value, the plain one, the profile's. At most 32."""
    if not settings["concurrency.continuousBatching"]:
        return Capacity(requests=1, reason="concurrency.continuousBatching is off")
    for key in (
        "memorySafety.customMaxConcurrentSequences",
        "concurrency.maxConcurrentSequences",
    ):
        value = settings[key]
        if value == "auto":
            return Capacity(requests="auto", reason=key)
        if value is not None:
            return Capacity(requests=max(1, min(value, MAX_CONCURRENT)), reason=key)
    mode = settings["memorySafety.mode"]
    return Capacity(requests=PROFILES[mode].concurrency, reason=f"the profile {mode}")
