"""TurboQuant (Zandieh et al. 2025, arXiv:2504.19874): each vector is normed, rotated so that
its coordinates look alike, and every coordinate replaced by the nearest of 2^b centroids.

Keys have two estimators. `mse` spends all b bits on the nearest centroid. `qjl` spends b - 1
there and one on the signs of random projections of what is left, which makes q.k unbiased
and noisier (QJL, arXiv:2406.03482). Values are always `mse`.

Both sums of attention are taken in the rotated domain, as the rotation is orthogonal:
q.k = |k| (Rq).C[idx], and the weighted values are rotated back once a query.

Letters: B blocks, K kv heads, H query heads, T rows.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from osaurus.kernels import kv_codec as maths
from osaurus.kernels.native.coded import NativeCodes, can_read
from osaurus.kernels.products import batched_product
from osaurus.topology.codecs.record import Field, RecordLayout

KeyEstimator = Literal["qjl", "mse"]

SEED = 42
_TINY = 1e-8
_MIN_DIM = 4


def is_eligible_dim(dim: int) -> bool:
    """Whether vectors of this length can be coded at all."""
    return dim >= _MIN_DIM


class TurboQuantCodec:
    """Implements `KVCodec`. Bytes of a token and head: packed codes, and float16 norms of the
    key (for `qjl` also of what its code leaves) and of the value."""

    def __init__(
        self,
        key_bits: int,
        value_bits: int,
        *,
        k_dim: int,
        v_dim: int,
        block_tokens: int,
        key_estimator: KeyEstimator = "mse",
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ValueError for bits outside 2 to 8 or head dims below 4."""
        for name, bits in (("key", key_bits), ("value", value_bits)):
            if not 2 <= bits <= 8:
                raise ValueError(f"turbo codec: {name} bits are {bits}, must be 2 to 8")
        for dim in (k_dim, v_dim):
            if not is_eligible_dim(dim):
                raise ValueError(f"turbo codec: head dim {dim} is below {_MIN_DIM}")
        self._k_dim, self._v_dim = k_dim, v_dim
        self._qjl = key_estimator == "qjl"
        self._k_bits = key_bits - 1 if self._qjl else key_bits
        self._v_bits = value_bits
        self.tag = f"turbo({key_bits},{value_bits},{key_estimator},np-rs1,{SEED})"
        fields = [
            Field("k_codes", maths.num_words(k_dim, self._k_bits), torch.int32),
            Field("v_codes", maths.num_words(v_dim, self._v_bits), torch.int32),
            Field("k_norm", 1, torch.float16),
            Field("v_norm", 1, torch.float16),
        ]
        if self._qjl:
            fields += [
                Field("k_signs", maths.num_words(k_dim, 1), torch.int32),
                Field("k_rest", 1, torch.float16),
            ]
        self._layout = RecordLayout(fields, block_tokens)
        self.block_bytes = self._layout.nbytes
        self._load_tables(device)
        self._native = self._describe(block_tokens)

    def _load_tables(self, device: torch.device | str) -> None:
        k_dim, v_dim = self._k_dim, self._v_dim
        self._k_flips = maths.rotation_signs(k_dim, SEED).to(device)
        self._v_flips = maths.rotation_signs(v_dim, SEED).to(device)
        self._k_levels = maths.codebook(k_dim, self._k_bits).to(device)
        self._v_levels = maths.codebook(v_dim, self._v_bits).to(device)
        self._k_table = maths.CodeTable(self._k_levels)
        self._v_table = maths.CodeTable(self._v_levels)
        self._sign_table = maths.CodeTable(torch.tensor([-1.0, 1.0], device=device))
        self._sketch = maths.sketch_matrix(k_dim, SEED).to(device)
        self._sketch_scale = math.sqrt(math.pi / 2) / k_dim
        rotation = maths.rotation_matrix(k_dim, SEED)
        if self._qjl:
            sketch = maths.sketch_matrix(k_dim, SEED).double()
            sketched = self._sketch_scale * (rotation.double() @ sketch.T)
            rotation = torch.cat([rotation, sketched.float()], dim=1)
        self._query_matrix = rotation.to(device)
        self._value_matrix = maths.rotation_matrix(v_dim, SEED).T.contiguous().to(device)

    def _describe(self, block_tokens: int) -> NativeCodes | None:
        if not can_read(self._k_levels.device, block_tokens):
            return None
        return NativeCodes(
            self._k_levels,
            self._v_levels,
            k_dim=self._k_dim,
            v_dim=self._v_dim,
            block_tokens=block_tokens,
            block_bytes=self.block_bytes,
            at=self._layout.starts(),
        )

    def native(self) -> NativeCodes | None:
        return self._native

    def fits(self, kv: Tensor) -> Tensor:
        keys, values = self._split(kv)
        norms = torch.stack([_norm(keys), _norm(values)]).half()
        return norms.isfinite().all(0).flatten(1).all(1)

    def encode(self, kv: Tensor) -> Tensor:
        keys, values = self._split(kv)
        k_norm, v_norm = _norm(keys), _norm(values)
        rotated = maths.rotate(keys / (k_norm + _TINY), self._k_flips)
        k_codes = maths.nearest(rotated, self._k_levels)
        v_codes = maths.nearest(
            maths.rotate(values / (v_norm + _TINY), self._v_flips), self._v_levels
        )
        parts = {
            "k_codes": maths.pack(k_codes, self._k_bits),
            "v_codes": maths.pack(v_codes, self._v_bits),
            "k_norm": k_norm,
            "v_norm": v_norm,
        }
        if self._qjl:
            rest = rotated - self._k_levels[k_codes]
            # One product a block and head: a shared one would round by how many there are.
            flat = rest.flatten(0, 1)
            sketched = batched_product(flat, self._sketch.T.expand(flat.shape[0], -1, -1))
            parts["k_signs"] = maths.pack((sketched >= 0).view(rest.shape), 1)
            parts["k_rest"] = _norm(rest)
        return self._layout.write(parts)

    def decode(self, coded: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        read = self._layout.read
        key_codes = maths.unpack(read(coded, "k_codes"), self._k_bits, self._k_dim)
        rotated = self._k_levels[key_codes]
        if self._qjl:
            signs = maths.unpack(read(coded, "k_signs"), 1, self._k_dim) * 2 - 1
            rest = read(coded, "k_rest").float() * (signs.float() @ self._sketch)
            rotated = rotated + self._sketch_scale * rest
        keys = read(coded, "k_norm").float() * maths.rotate_back(rotated, self._k_flips)
        value_codes = maths.unpack(read(coded, "v_codes"), self._v_bits, self._v_dim)
        values = maths.rotate_back(self._v_levels[value_codes], self._v_flips)
        return torch.cat([keys, read(coded, "v_norm").float() * values], dim=-1).to(dtype)

    def rotate_queries(self, q: Tensor) -> Tensor:
        return batched_product(q, self._query_matrix.expand(q.shape[0], -1, -1))

    def keys(self, coded: Tensor) -> Tensor:
        read = self._layout.read
        norm = read(coded, "k_norm").float()
        codes = self._k_table(read(coded, "k_codes"), self._k_dim) * norm
        if not self._qjl:
            return codes
        norm = norm * read(coded, "k_rest").float()
        signs = self._sign_table(read(coded, "k_signs"), self._k_dim) * norm
        return torch.cat([codes, signs], dim=-1)

    def values(self, coded: Tensor) -> Tensor:
        codes = self._v_table(self._layout.read(coded, "v_codes"), self._v_dim)
        return codes * self._layout.read(coded, "v_norm").float()

    def rotate_back(self, summed: Tensor) -> Tensor:
        return batched_product(summed, self._value_matrix.expand(summed.shape[0], -1, -1))

    def _split(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        kv = kv.float()
        return kv[..., : self._k_dim], kv[..., self._k_dim :]


def _norm(x: Tensor) -> Tensor:
    """[..., D] to [..., 1]."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)
