"""gpt-oss checkpoints: experts of a layer in one tensor of MXFP4 blocks and one of scales.

Source: OCP Microscaling Formats (MX) 1.0 and the published checkpoints: `X_blocks` [E, N, G, 16]
holds 32 codes a block, two a byte with the first in the low half, and `X_scales` [E, N, G]
their exponents. The weight is stored [N, K], unlike the plain one of the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant import floats
from osaurus.quant.bits import unpack
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.scheme import Part

_GROUP = 32
#: How the two parts end in a checkpoint -> as parts of a matrix.
_ENDINGS = {"_blocks": ".blocks", "_scales": ".scales"}


@dataclass(frozen=True, slots=True)
class Mxfp4:
    marker: str = "blocks"
    ignored: tuple[str, ...] = ()
    rows_first: bool = True

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> Mxfp4:
        return cls()

    def __str__(self) -> str:
        return f"MXFP4 in groups of {_GROUP}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        if k % _GROUP:
            raise UnsupportedBundle(f"{k} input features are not whole groups of {_GROUP}")
        groups = k // _GROUP
        return {
            "blocks": Part(((n, groups, _GROUP // 2),), ("U8",)),
            "scales": Part(((n, groups),), ("U8",)),
        }

    def decode(self, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedWeight:
        n, k = shape
        codes = unpack(stored["blocks"].reshape(n, k // 2), 4)
        return floats.e2m1_weight(codes, floats.e8m0(stored["scales"]))


def spelled_as_parts(names: Iterable[str]) -> dict[str, str]:
    """Stored names by those that a matrix's parts have: `X.blocks` for `X_blocks`."""
    found: dict[str, str] = {}
    for name in names:
        ending = next((end for end in _ENDINGS if name.endswith(end)), "")
        found[name.removesuffix(ending) + _ENDINGS[ending] if ending else name] = name
    return found
