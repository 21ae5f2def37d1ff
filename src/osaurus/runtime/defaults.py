"""A bundle's own sampling values, from its `generation_config.json`, checked once at load.

A value that is no number or out of range is left out with one warning: a bundle's mistake must
not fail every request. Length limits are not sampling and are not read: the default budget
of an answer is the room left in the context, never a number hidden in a file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from osaurus.errors import InvalidField
from osaurus.types.sampling import INTEGER_FIELDS, check_number

logger = logging.getLogger(__name__)

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Mapping[str, Any], model_id: str) -> dict[str, float]:
    """By field name of `SamplingParams`. `do_sample: false` means temperature 0."""
    defaults: dict[str, float] = {}
    for name in _FIELDS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            check_number(name, value)
        except InvalidField as error:
            logger.warning("%s: generation_config.json is ignored for %s", model_id, error.message)
            continue
        defaults[name] = int(value) if name in INTEGER_FIELDS else float(value)
    if generation_config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults
