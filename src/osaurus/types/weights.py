"""Words about weights that settings, the command line and the loader share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What matrices in plain numbers become while they are loaded: 8 or 4 bits a weight.
QuantizeOnLoad = Literal["int8", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """One tensor as stored, under its Hugging Face name: `shape` in elements of `encoding`."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    num_bytes: int
