"""The arithmetic of KV codecs: rotation, scalar codebook, packing into words, and the table
that turns words back into values. Tensors in, tensors out; which parts make a codec, and
where they lie in memory, is `topology/codecs`' affair.

Everything here is the same for a vector whatever lies beside it: element-wise operations,
table reads and sums over the last dimension.

Letters: D head dim, b bits, N words a vector.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: One table read yields several values; a larger table than this leaves the core's cache.
_TABLE_BYTES = 1 << 20
_LLOYD_ROUNDS = 200
_GRID_POINTS = (1 << 15) + 1


@cache
def rotation_signs(dim: int, seed: int) -> Tensor:
    """[D] float32 of -1 and +1, from numpy's frozen generator: the same on every machine."""
    draws = np.random.RandomState(seed).random_sample(dim)
    return torch.from_numpy(np.where(draws < 0.5, -1.0, 1.0).astype(np.float32))


@cache
def sketch_matrix(dim: int, seed: int) -> Tensor:
    """[D, D] float32 of standard normal values: the projections whose signs QJL keeps
    (Zandieh et al. 2024, arXiv:2406.03482)."""
    draws = np.random.RandomState(seed + 1000).standard_normal((dim, dim))
    return torch.from_numpy(draws.astype(np.float32))


def hadamard(x: Tensor) -> Tensor:
    """Normalised Walsh-Hadamard transform over the last dimension; its own inverse.

    x: [..., D] float32. A D that is no power of two is cut into descending powers of two,
    each transformed by itself: 96 is 64 and 32.
    """
    dim = x.shape[-1]
    part = 1 << (dim.bit_length() - 1)
    if part != dim:
        return torch.cat([hadamard(x[..., :part]), hadamard(x[..., part:])], dim=-1)
    width = 1
    while width < dim:
        pairs = x.unflatten(-1, (dim // (2 * width), 2, width))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        width *= 2
    return x * dim**-0.5


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """H(s * x): spreads a vector's energy evenly over its coordinates. x: [..., D] float32."""
    return hadamard(x * signs)


def rotate_back(y: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return hadamard(y) * signs


@cache
def rotation_matrix(dim: int, seed: int) -> Tensor:
    """R [D, D] float32 with x @ R = rotate(x) and y @ R.T = rotate_back(y)."""
    return rotate(torch.eye(dim), rotation_signs(dim, seed))


@cache
def codebook(dim: int, bits: int) -> Tensor:
    """Lloyd-Max centroids of one coordinate of a random unit vector (TurboQuant, Zandieh et
    al. 2025, arXiv:2504.19874): density (1 - x^2)^((D - 3) / 2).

    Returns [2^b] float32, ascending and symmetric. Raises ValueError for D <= 3, where the
    density is flat or worse.
    """
    if dim <= 3:
        raise ValueError(f"a codebook needs vectors of more than 3 values, not {dim}")
    reach = min(1.0, 8 / math.sqrt(dim))
    grid = np.linspace(-reach, reach, _GRID_POINTS)
    density = np.maximum(1 - grid**2, 0.0) ** ((dim - 3) / 2)
    mass_before, moment_before = _integral(density), _integral(density * grid)
    levels = np.linspace(-3, 3, 1 << bits) / math.sqrt(dim)
    for _ in range(_LLOYD_ROUNDS):
        edges = np.concatenate([[-reach], (levels[1:] + levels[:-1]) / 2, [reach]])
        # Between grid points the integrals are interpolated: cells that move by whole points
        # come to rest early, off by more than the golden values allow.
        mass = np.diff(np.interp(edges, grid, mass_before))
        moment = np.diff(np.interp(edges, grid, moment_before))
        # A cell beyond the density's end is empty and keeps its centroid.
        levels = np.where(mass > 0, moment / np.maximum(mass, 1e-300), levels)
    levels = (levels - levels[::-1]) / 2
    return torch.from_numpy(levels.astype(np.float32))


def _integral(values: np.ndarray) -> np.ndarray:
    """Trapezoid sums up to each grid point, in grid steps."""
    return np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2)])


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Index of the nearest of ascending `levels`: how many midpoints lie strictly below.

    x: [...] float32. Returns int64 of the same shape.
    """
    midpoints = (levels[1:] + levels[:-1]) / 2
    if levels.numel() > 16:
        return torch.bucketize(x, midpoints)
    # With few levels counting is four times as fast as searching.
    below = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint in midpoints:
        below += x > midpoint
    return below.long()


def num_words(dim: int, bits: int) -> int:
    """32-bit words that hold one vector of `dim` codes; a vector starts on a word."""
    return -(-dim // (32 // bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes into words, the first in the lowest bits; no code crosses a word.

    codes: [..., D] integers in [0, 2^b). Returns [..., N] int32 bit patterns.
    """
    per_word, words = 32 // bits, num_words(codes.shape[-1], bits)
    padded = F.pad(codes.long(), (0, words * per_word - codes.shape[-1]))
    shifts = bits * torch.arange(per_word, device=codes.device)
    joined = (padded.unflatten(-1, (words, per_word)) << shifts).sum(-1)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).int()


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """The inverse of `pack`: [..., N] int32 to [..., D] int64. The plain form of `CodeTable`."""
    shifts = bits * torch.arange(32 // bits, device=words.device)
    codes = (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :dim]


class CodeTable:
    """Turns packed words into the values their codes stand for, several a table read.

    Worked example, b = 3: ten codes a word, five a read, so a word is two reads of 15 bits
    in a table of 32,768 rows of five values: half the time of one read a code.
    """

    def __init__(self, levels: Tensor) -> None:
        """levels: [2^b] float32, the value of each code, on the device of later words."""
        bits = levels.numel().bit_length() - 1
        per_word = 32 // bits
        self._per_read = max(
            count
            for count in range(1, per_word + 1)
            if per_word % count == 0
            and count * bits <= 16
            and count << (count * bits + 2) <= _TABLE_BYTES
        )
        field = self._per_read * bits
        device = levels.device
        self._shifts = field * torch.arange(
            per_word // self._per_read, dtype=torch.int32, device=device
        )
        self._mask = (1 << field) - 1
        rows = torch.arange(1 << field, device=device).unsqueeze(1)
        codes = (rows >> bits * torch.arange(self._per_read, device=device)) & ((1 << bits) - 1)
        self._table = levels[codes]

    def __call__(self, words: Tensor, dim: int) -> Tensor:
        """[..., N] int32 to [..., D] float32, a view whose rows may lie further apart."""
        reads = (words.unsqueeze(-1) >> self._shifts) & self._mask
        values = F.embedding(reads.flatten(), self._table)
        return values.view(*words.shape[:-1], -1)[..., :dim]
