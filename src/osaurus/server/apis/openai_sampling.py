"""The fields that chat and legacy completions have in common, to sampling values by the names of
`SamplingParams`; only what the client set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from osaurus.errors import InvalidField
from osaurus.server.apis.openai_wire import SamplingBody
from osaurus.server.apis.shared_fields import sampling_number, stop_strings

MAX_CHOICES = 32
MAX_LOGIT_BIASES = 4096

_NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
)


def sampling_fields(body: SamplingBody) -> dict[str, Any]:
    """All but the limits and probabilities that have another name in each of the two."""
    sampling: dict[str, Any] = {}
    for name in _NUMBERS:
        value = getattr(body, name)
        if value is not None:
            sampling[name] = sampling_number(name, value)
    if body.stop is not None:
        sampling["stop"] = stop_strings(body.stop)
    if body.logit_bias is not None:
        sampling["logit_bias"] = _logit_bias(body.logit_bias)
    if body.stop_token_ids is not None:
        sampling["stop_token_ids"] = tuple(
            _token_id(f"stop_token_ids[{i}]", token) for i, token in enumerate(body.stop_token_ids)
        )
    if body.ignore_eos:
        sampling["ignore_eos"] = True
    return sampling


def num_choices(n: int | None) -> int:
    if n is None:
        return 1
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidField("n", f"must be at least 1 and at most {MAX_CHOICES}, got {n}")
    return n


def _logit_bias(biases: Mapping[str, Any]) -> dict[int, float]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidField(
            "logit_bias", f"may hold at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}"
        )
    return {
        _token_id("logit_bias", token): sampling_number(
            "logit_bias", bias, f"logit_bias.{token[:20]}"
        )
        for token, bias in biases.items()
    }


def _token_id(label: str, token: str | int) -> int:
    if isinstance(token, str) and not (token.isascii() and token.isdigit() and len(token) < 19):
        raise InvalidField(label, f"keys must be token ids, got {token[:20]!r}")
    if not 0 <= int(token) < 2**31:
        raise InvalidField(label, f"token ids are at least 0 and below 2^31, got {token}")
    return int(token)
