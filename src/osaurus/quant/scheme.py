"""How a checkpoint stores a quantized matrix: the tensors that stand in for `weight`, and what
they mean. A format is one `Scheme`; `schemes.py` finds it from the config.

In: raw tensors of one module and the shape that the model asks for. Out: grouped codes, or a
dense bfloat16 weight where the format is not affine. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from osaurus.quant.grouped import GroupedWeight

#: safetensors dtype name -> the torch dtype its bytes are read as. Unsigned words are taken as
#: signed ones, since torch computes little with the former; only their bits are looked at.
DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
}
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a stored matrix: the shapes it may have and its safetensors dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class Scheme(Protocol):
    """`marker` is the part whose presence says that a module is stored this way; `ignored`
    are parts that only other ways of computing need. With `rows_first` the first dimension of
    every part is the output features, and any of them can be decoded alone."""

    @property
    def marker(self) -> str: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...
    @property
    def rows_first(self) -> bool: ...

    def __str__(self) -> str:
        """A few words for messages: `MLX 4 bits in groups of 64`."""
        ...

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        """Every tensor of a matrix [n, k]. Raises `UnsupportedBundle` for a shape that the
        format does not divide."""
        ...

    def decode(
        self, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> GroupedWeight | Tensor:
        """The weight. `stored` has the parts that are there, checked against `parts`, in the
        types of `DTYPES`, possibly over read-only memory. Raises `UnsupportedBundle`."""
        ...
