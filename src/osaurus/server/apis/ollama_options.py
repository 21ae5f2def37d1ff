"""Ollama's `options`, `think` and `keep_alive` as this program's values.

Options that are not known change nothing and are ignored, as Ollama ignores them; a known one
of a wrong type or out of range is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from osaurus.chat.profiles import EFFORT, SWITCH
from osaurus.errors import InvalidField
from osaurus.server.apis.shared_fields import sampling_number, stop_strings
from osaurus.types.runtime import ResidencyPolicy

#: Field of `SamplingParams` by option. OpenAI's name of the penalty is taken too.
_NUMBERS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
#: What is kept longer is kept for ever.
_LONGEST_S = 100 * 365 * 86_400


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Only what the client set, by field name of `SamplingParams`."""
    sampling: dict[str, Any] = {}
    for name, field in _NUMBERS.items():
        if (value := options.get(name)) is not None:
            sampling[field] = sampling_number(field, value, f"options.{name}")
    if (seed := options.get("seed")) is not None and (
        number := sampling_number("seed", seed, "options.seed")
    ) != -1:  # which is Ollama's word for any
        sampling["seed"] = number
    limit = _whole(options, "num_predict")
    if limit is not None and limit > 0:
        sampling["max_tokens"] = limit
    if (stop := options.get("stop")) is not None:
        sampling["stop"] = _stops(stop)
    _window(sampling, _whole(options, "repeat_last_n"))
    if (context := _whole(options, "num_ctx")) is not None and context < 1:
        raise InvalidField("options.num_ctx", f"must be at least 1, got {context}")
    return sampling


def _window(sampling: dict[str, Any], window: int | None) -> None:
    """How many tokens back penalties look: 0 means that there are none, below that all count."""
    if window == 0:
        sampling.update(_NO_PENALTIES)
    elif window is not None and window > 0:
        sampling["penalty_window"] = window


def _whole(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise InvalidField(f"options.{name}", f"must be a whole number, got {str(value)[:40]!r}")
    if abs(value) > 2**63:
        raise InvalidField(f"options.{name}", f"must be at most {2**63} in size")
    return int(value)


def _stops(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, (str, list)) or not all(isinstance(text, str) for text in stop):
        raise InvalidField("options.stop", "must be a string or an array of strings")
    return stop_strings(stop, "options.stop")


def thinking_of(think: Any) -> dict[str, Any]:
    """The template switches that a request's `think` stands for."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {SWITCH: think}
    if isinstance(think, str) and think.lower() in _EFFORTS:
        return {EFFORT: think.lower()}
    raise InvalidField(
        "think", f"must be true, false or one of {', '.join(_EFFORTS)}, got {str(think)[:40]!r}"
    )


def keep_alive_policy(value: Any) -> ResidencyPolicy | None:
    """How long the model stays after this request; None leaves it as it is.

    Seconds, or a duration such as "5m" or "1h30m". 0 unloads at once, below that is never.
    """
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None:
        raise InvalidField(
            "keep_alive",
            f'must be seconds or a duration such as "5m", got {str(value)[:40]!r}; '
            "0 unloads at once, -1 never",
        )
    if seconds == 0:
        return ResidencyPolicy(mode="immediately")
    if seconds < 0 or seconds > _LONGEST_S:
        return ResidencyPolicy(mode="never")
    return ResidencyPolicy(mode="after_seconds", seconds=seconds)


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 2**63 else math.copysign(math.inf, value)
    if not isinstance(value, str) or len(value) > 64:
        return None
    text = value.strip()
    sign = -1.0 if text.startswith("-") else 1.0
    text = text.removeprefix("-").removeprefix("+")
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", text):
        return sign * float(text)
    parts = list(_DURATION.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        return None
    return sign * sum(float(part[1]) * _UNITS_S[part[2]] for part in parts)
