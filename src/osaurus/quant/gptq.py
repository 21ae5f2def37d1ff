"""GPTQ checkpoints: codes packed along the input features, zero points beside the scales.

Source: the `qweight`, `qzeros`, `scales`, `g_idx` buffers that AutoGPTQ and GPTQModel write. The
first format stores each zero point less one; `checkpoint_format: gptq_v2` stores it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.quant.bits import bytes_of, unpack
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.scheme import FLOATS, Part

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Gptq:
    """W[n, k] = (code - zero) * scale, zero and scale those of group `g_idx[k]`."""

    bits: int
    group_size: int
    stores_zero_less_one: bool
    marker: str = "qweight"
    ignored: tuple[str, ...] = ()
    rows_first: bool = False

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> Gptq:
        bits, group = entry.get("bits"), entry.get("group_size", 128)
        if bits not in BITS or not isinstance(group, int):
            raise UnsupportedBundle(
                f"GPTQ with bits {bits!r} and group_size {group!r} is not supported "
                "(bits: 2, 3, 4, 8)"
            )
        form = entry.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise UnsupportedBundle(f"GPTQ checkpoint_format {form!r} is not supported")
        return cls(bits, group, form == "gptq")

    def __str__(self) -> str:
        return f"GPTQ, {self.bits} bits in groups of {self.group_size}"

    def parts(self, n: int, k: int) -> Mapping[str, Part]:
        group = self._group(k)
        if k % group or (k * self.bits) % 32 or (n * self.bits) % 32:
            raise UnsupportedBundle(
                f"a matrix of {n} x {k} is not whole groups of {group} and words of "
                f"{self.bits} bits"
            )
        groups = k // group
        return {
            "qweight": Part(((k * self.bits // 32, n),), ("I32", "U32")),
            "qzeros": Part(((groups, n * self.bits // 32),), ("I32", "U32")),
            "scales": Part(((groups, n),), FLOATS),
            "g_idx": Part(((k,),), ("I32", "I64"), optional=True),
        }

    def decode(
        self, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> GroupedWeight | Tensor:
        codes = unpack(bytes_of(stored["qweight"].t()), self.bits)
        zeros = unpack(bytes_of(stored["qzeros"]), self.bits).t()
        if self.stores_zero_less_one:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return with_zero_points(
            codes,
            stored["scales"].t().contiguous(),
            zeros,
            bits=self.bits,
            group_of=stored.get("g_idx"),
        )

    def _group(self, k: int) -> int:
        return self.group_size if self.group_size > 0 else k


def with_zero_points(
    codes: Tensor, scale: Tensor, zeros: Tensor, *, bits: int, group_of: Tensor | None = None
) -> GroupedWeight | Tensor:
    """W[n, k] = (code - zero) * scale.

    codes: [N, K] uint8; scale: [N, G]; zeros: [N, G] or a number's [1, 1], integers; group_of:
    [K], which group a column belongs to, consecutive runs when absent. Columns are brought
    together by group where those are equally large; else the weight becomes dense bfloat16.
    Raises `UnsupportedBundle` for a group that does not exist.
    """
    k, groups = codes.shape[1], scale.shape[1]
    bias = -scale.float() * zeros
    size = k // groups
    order: Tensor | None = None
    if group_of is not None:
        group_of = group_of.long()
        if bool(((group_of < 0) | (group_of >= groups)).any()):
            raise UnsupportedBundle(f"g_idx names a group that is none of the {groups}")
        if not torch.equal(group_of, torch.arange(k) // size):
            if bool((group_of.bincount(minlength=groups) != size).any()):
                weight = codes.float() * scale.float()[:, group_of] + bias[:, group_of]
                return weight.bfloat16()
            order = group_of.argsort(stable=True)
            codes = codes[:, order]
    return GroupedWeight(
        bits=bits, group_size=size, codes=codes, scale=scale, bias=bias, order=order
    )
