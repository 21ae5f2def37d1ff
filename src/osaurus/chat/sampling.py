"""Which sampling values run: the request's, else the user's, else the bundle's, else the
engine's, per field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from osaurus.errors import ContextLengthExceeded, InvalidField
from osaurus.types.sampling import SamplingParams

_FIELDS = frozenset(field.name for field in fields(SamplingParams))


def effective_sampling(
    explicit: Mapping[str, Any],
    bundle_defaults: Mapping[str, Any],
    users_defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """`users_defaults` are the settings'. Raises `InvalidField` for an unknown field or a value
    out of range."""
    unknown = sorted(set(explicit) - _FIELDS)
    if unknown:
        raise InvalidField(unknown[0], "is no sampling field")
    params = SamplingParams(**{**bundle_defaults, **(users_defaults or {}), **explicit})
    if params.top_k < 0:
        params = replace(params, top_k=0)  # both spellings of "off" in the wild
    return params.validate()


def fit_to_context(params: SamplingParams, prompt_tokens: int, context: int) -> SamplingParams:
    """Give the answer what it asked for, at most the room that the prompt leaves, and all of
    that room when it asked for nothing. Raises `ContextLengthExceeded` when there is none."""
    if prompt_tokens >= context:
        # A prompt that fills the context to the last token leaves no room for an answer.
        limit = context if prompt_tokens > context else context - 1
        raise ContextLengthExceeded(prompt_tokens, limit)
    room = context - prompt_tokens
    wanted = params.max_tokens
    return replace(params, max_tokens=room if wanted is None else min(wanted, room))
