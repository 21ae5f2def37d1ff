"""NVIDIA ModelOpt checkpoints: FP8 with one scale a matrix, and NVFP4.

Source: ModelOpt's unified Hugging Face export: `weight_scale`, and for NVFP4 `weight_scale_2`,
by which the group scales are multiplied (compressed-tensors divides by its counterpart).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant import floats
from osaurus.quant.bits import unpack
from osaurus.quant.fp8 import Fp8
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.scheme import Part, Scheme

_GROUP = 16
_IGNORED = ("input_scale", "k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class ModelOptNvfp4:
    marker: str = "weight_scale_2"
    ignored: tuple[str, ...] = _IGNORED
    rows_first: bool = False

    def __str__(self) -> str:
        return f"ModelOpt NVFP4 in groups of {_GROUP}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        if k % _GROUP:
            raise UnsupportedBundle(f"{k} input features are not whole groups of {_GROUP}")
        return {
            "weight": Part(((n, k // 2),), ("U8",)),
            "weight_scale": Part(((n, k // _GROUP),), ("F8_E4M3",)),
            "weight_scale_2": Part(((), (1,)), ("F32",)),
        }

    def decode(self, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> GroupedWeight:
        scale = stored["weight_scale"].float() * stored["weight_scale_2"]
        return floats.e2m1_weight(unpack(stored["weight"], 4), scale)


def modelopt_scheme(entry: Mapping[str, Any]) -> Scheme:
    algorithm = entry.get("quant_algo")
    if algorithm == "FP8":
        return Fp8("weight_scale", None, _IGNORED)
    if algorithm == "NVFP4":
        return ModelOptNvfp4()
    raise UnsupportedBundle(f"ModelOpt algorithm {algorithm!r} is not supported (FP8, NVFP4)")
