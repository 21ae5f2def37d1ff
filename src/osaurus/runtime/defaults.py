"""A bundle's own sampling values, checked once at load: those of its maker's `jang_config.json`
(`chat.sampling_defaults`), gaps filled from `generation_config.json`.

A value that is no number or out of range is left out with one warning: a bundle's mistake must
not fail every request. Length limits are not sampling and are not read: the default budget
of an answer is the room left in the context, never a number hidden in a file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from osaurus.bundle.config import read_optional
from osaurus.errors import InvalidField
from osaurus.types.sampling import INTEGER_FIELDS, check_number

logger = logging.getLogger(__name__)


class _Bundle(Protocol):
    @property
    def model_id(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...


_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def bundle_sampling(bundle: _Bundle) -> dict[str, float]:
    """By field name of `SamplingParams`."""
    defaults = sampling_defaults(bundle.generation_config, bundle.model_id)
    if not bundle.path.is_dir():
        return defaults
    chat = read_optional(bundle.path / "jang_config.json").get("chat")
    own = chat.get("sampling_defaults") if isinstance(chat, Mapping) else None
    if isinstance(own, Mapping):
        defaults |= sampling_defaults(own, bundle.model_id, file="jang_config.json")
    return defaults


def sampling_defaults(
    generation_config: Mapping[str, Any], model_id: str, *, file: str = "generation_config.json"
) -> dict[str, float]:
    """Those of one file. `do_sample: false` means temperature 0."""
    defaults: dict[str, float] = {}
    for name in _FIELDS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            check_number(name, value)
        except InvalidField as error:
            logger.warning("%s: %s is ignored for %s", model_id, file, error.message)
            continue
        defaults[name] = int(value) if name in INTEGER_FIELDS else float(value)
    if generation_config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults
