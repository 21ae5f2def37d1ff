"""Affine codes: each group of neighbouring values of a vector becomes b-bit steps between its
least and its greatest, as in MLX's quantized KV cache.

x = bias + scale * code, bias = min, scale = (max - min) / (2^b - 1). Scale and bias are kept
in float16 and the codes chosen for the kept ones, so their rounding costs nothing more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from osaurus.kernels import kv_codec as maths
from osaurus.kernels.native.coded import NativeCodes
from osaurus.topology.codecs.record import Field, RecordLayout


def is_eligible_dim(dim: int, group: int) -> bool:
    """Whether vectors of this length are whole groups."""
    return dim % group == 0


class AffineCodec:
    """Implements `KVCodec`. Bytes of a token and head: packed codes of key and value, and a
    float16 scale and bias for each group of either."""

    def __init__(
        self,
        bits: int,
        group: int,
        *,
        k_dim: int,
        v_dim: int,
        block_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ValueError for bits, groups or head dims that are not served."""
        if bits not in (4, 8) or group not in (32, 64):
            raise ValueError(f"affine codec: {bits} bits in groups of {group}; 4 or 8 in 32 or 64")
        for dim in (k_dim, v_dim):
            if not is_eligible_dim(dim, group):
                raise ValueError(f"affine codec: head dim {dim} is no multiple of {group}")
        self._bits, self._group = bits, group
        self._k_dim, self._v_dim = k_dim, v_dim
        self.tag = f"affine({bits},{group})"
        fields: list[Field] = []
        for name, dim in (("k", k_dim), ("v", v_dim)):
            fields += [
                Field(f"{name}_codes", maths.num_words(dim, bits), torch.int32),
                Field(f"{name}_scale", dim // group, torch.float16),
                Field(f"{name}_bias", dim // group, torch.float16),
            ]
        self._layout = RecordLayout(fields, block_tokens)
        self.block_bytes = self._layout.nbytes
        self._table = maths.CodeTable(torch.arange(float(1 << bits), device=device))

    def fits(self, kv: Tensor) -> Tensor:
        finite = [part.isfinite().flatten(1).all(1) for part in self._scales(kv)]
        return finite[0] & finite[1]

    def encode(self, kv: Tensor) -> Tensor:
        scale, bias = (part.float().unsqueeze(-1) for part in self._scales(kv))
        # A group of equal values has scale 0; any divisor gives it code 0.
        steps = (self._groups(kv) - bias) / torch.where(scale > 0, scale, 1.0)
        codes = steps.round_().clamp_(0, (1 << self._bits) - 1).flatten(-2)
        at, groups = self._k_dim, self._k_dim // self._group
        return self._layout.write(
            {
                "k_codes": maths.pack(codes[..., :at], self._bits),
                "v_codes": maths.pack(codes[..., at:], self._bits),
                "k_scale": scale[..., :groups, 0],
                "v_scale": scale[..., groups:, 0],
                "k_bias": bias[..., :groups, 0],
                "v_bias": bias[..., groups:, 0],
            }
        )

    def decode(self, coded: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        parts: list[Tensor] = []
        for name, dim in (("k", self._k_dim), ("v", self._v_dim)):
            codes = maths.unpack(self._layout.read(coded, f"{name}_codes"), self._bits, dim)
            parts.append(self._scaled(coded, name, codes.float()))
        return torch.cat(parts, dim=-1).to(dtype)

    def rotate_queries(self, q: Tensor) -> Tensor:
        return q

    def keys(self, coded: Tensor) -> Tensor:
        words = self._layout.read(coded, "k_codes")
        return self._scaled(coded, "k", self._table(words, self._k_dim))

    def values(self, coded: Tensor) -> Tensor:
        words = self._layout.read(coded, "v_codes")
        return self._scaled(coded, "v", self._table(words, self._v_dim))

    def rotate_back(self, summed: Tensor) -> Tensor:
        return summed

    def native(self) -> NativeCodes | None:
        return None

    def _groups(self, kv: Tensor) -> Tensor:
        return kv.float().unflatten(-1, (-1, self._group))

    def _scales(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K, block, Dk + Dv] to scale and bias, each [B, K, block, groups] float16."""
        low, high = self._groups(kv).aminmax(dim=-1)
        return ((high - low) / ((1 << self._bits) - 1)).half(), low.half()

    def _scaled(self, coded: Tensor, name: str, codes: Tensor) -> Tensor:
        scale = self._layout.read(coded, f"{name}_scale").float().unsqueeze(-1)
        bias = self._layout.read(coded, f"{name}_bias").float().unsqueeze(-1)
        return (codes.unflatten(-1, (-1, self._group)) * scale + bias).flatten(-2)
