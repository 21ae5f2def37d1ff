"""JSON in one spelling: sorted keys, no spaces, UTF-8 as it is, no NaN.

Equal values give equal bytes, so that what is put into a prompt or a hash does not depend on
the order in which a client wrote its keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def canonical_json(value: Any) -> str:
    """Raises `ValueError` or `TypeError` for non-finite numbers, keys that are no strings and
    values that JSON does not have."""
    _check_keys(value)
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def _check_keys(value: Any) -> None:
    # json.dumps would turn 1 and True into "1" and "true", which may collide with real keys.
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"JSON object keys are strings, got {type(key).__name__}")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)
