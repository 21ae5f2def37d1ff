"""How a request wants its tokens chosen, and the legal range of each field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from osaurus.errors import InvalidField


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a numeric field; an exclusive lower bound is `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and value <= self.high

    def __str__(self) -> str:
        bound = f"greater than {self.low:g}" if self.open_low else f"at least {self.low:g}"
        return bound if math.isinf(self.high) else f"{bound} and at most {self.high:g}"


#: The one place where a sampling field's range is written; every API validates with it.
RANGES: Mapping[str, Range] = {
    "max_tokens": Range(1, math.inf),
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0),
    "top_k": Range(-1, math.inf),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.0, 10.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "penalty_window": Range(1, math.inf),
    "logit_bias": Range(-100.0, 100.0),
    "top_logprobs": Range(0, 20),
    "seed": Range(-(2**63), 2**63 - 1),
    "min_tokens": Range(0, math.inf),
}

#: Fields that hold whole numbers.
INTEGER_FIELDS = frozenset(
    {"max_tokens", "top_k", "penalty_window", "top_logprobs", "seed", "min_tokens"}
)


def check_number(name: str, value: object, *, label: str | None = None) -> None:
    """Raise `InvalidField` unless `value` is a finite number inside `RANGES[name]`.

    `label` is the field's name on the wire when it differs (`max_completion_tokens`).
    """
    label = label or name
    wanted = "a whole number" if name in INTEGER_FIELDS else "a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidField(label, f"must be {wanted}, got {type(value).__name__}")
    if not math.isfinite(value):
        raise InvalidField(label, f"must be {wanted}, got {value}")
    if name in INTEGER_FIELDS and value != int(value):
        raise InvalidField(label, f"must be {wanted}, got {value}")
    if not RANGES[name].holds(value):
        raise InvalidField(label, f"must be {RANGES[name]}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings. Defaults are the engine's, not a model's.

    Order of application: repetition, presence, frequency penalties, `logit_bias`, then
    temperature, top-k, top-p, min-p. `temperature == 0` is argmax, ties to the lowest id,
    whatever the filters say. Presence and frequency count generated tokens; repetition
    counts prompt and generated tokens; `penalty_window` limits all three to the last n.
    """

    max_tokens: int | None = None
    temperature: float = 0.6
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: bool = False
    top_logprobs: int = 0

    def validate(self) -> SamplingParams:
        """Check every field against `RANGES`; return self. Raises `InvalidField`."""
        for name in RANGES:
            value = getattr(self, name)
            if name == "logit_bias":
                for token, bias in self.logit_bias.items():
                    check_number("logit_bias", bias, label=f"logit_bias[{token}]")
            elif value is not None:
                check_number(name, value)
        return self

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.repetition_penalty not in (None, 0, 1)
            or self.presence_penalty
            or self.frequency_penalty
        )
