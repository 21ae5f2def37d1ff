"""From stored tensors to layers: decode once, in the compute mode's form.

Every name a family asks for is ticked off, so that a bundle with missing, misshapen or
unexpected tensors is refused before it answers anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from osaurus.bundle.weights import WeightSource
from osaurus.errors import UnsupportedBundle
from osaurus.kernels.heap import trim_heap
from osaurus.kernels.native.matrix import can_hold
from osaurus.models.stored import MatrixStore, StoredMatrix, missing, typed
from osaurus.quant import gguf
from osaurus.quant.dense import hollow
from osaurus.quant.grouped import GroupedWeight, UndecodedWeight, slab_rows
from osaurus.quant.linear import (
    DenseEmbedding,
    Embedding,
    Linear,
    NativeEmbedding,
    fused_linear,
    grouped_embedding,
)
from osaurus.quant.native import plain_matrix
from osaurus.quant.on_load import can_quantize, quantize
from osaurus.quant.schemes import Schemes
from osaurus.types.weights import QuantizeOnLoad

ComputeMode = Literal["float32", "bfloat16"]

#: Plain weights copied before their pages are given back.
_COPY_SLAB = 1 << 24
#: Bytes read between two returns of what decoding left free on the heap.
_TRIM_EVERY_BYTES = 32 << 20

_T = TypeVar("_T")


class WeightLoader:
    """Hands out a bundle's tensors in the form of one compute mode, each name once.

    float32 is the oracle mode: everything dequantized. bfloat16 keeps quantized weights
    quantized and the rest in bfloat16; norms are float32 in both. `schemes` says how matrices
    of a quantized checkpoint are stored. `on_load` quantizes those in plain numbers: embedding
    and head to 8 bits whatever it says, since 4 bits there cost most for what they save.
    """

    def __init__(
        self,
        source: WeightSource,
        mode: ComputeMode,
        device: torch.device | str = "cpu",
        *,
        schemes: Schemes | None = None,
        on_load: QuantizeOnLoad | None = None,
    ) -> None:
        self._store = MatrixStore(source, schemes)
        self._mode: ComputeMode = mode
        self._on_load: QuantizeOnLoad | None = on_load
        self.device = torch.device(device)
        self._left = set(source.names())
        self._read_bytes = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self._mode == "float32" else torch.bfloat16

    def has(self, name: str) -> bool:
        return not self._left.isdisjoint(self._store.names_of(name))

    def names(self) -> list[str]:
        """What nobody has asked for yet, as it is stored."""
        return sorted(self._left)

    def skip(self, *names: str) -> None:
        """Leave tensors that the family knows and does not need."""
        for name in names:
            self._left.difference_update(self._store.names_of(name))

    def skip_under(self, *prefixes: str) -> None:
        """The same for every tensor whose name starts with one of `prefixes`."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A 1-D tensor [size], float32 unless told otherwise."""
        return self._plain(name, (size,), dtype or torch.float32)

    def optional_vector(self, name: str, size: int, dtype: torch.dtype) -> Tensor | None:
        return self.vector(name, size, dtype) if self.has(name) else None

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that stays dense in every mode, float32: a router's weight."""
        if len(shape) == 2:
            matrix = self._find(name, (shape[0], shape[1]))
            weight = matrix.decode()
            dense = (
                weight.dequantize(torch.float32) if isinstance(weight, GroupedWeight) else weight
            )
            return self._done(name, dense.to(self.device, torch.float32, copy=True))
        return self._plain(name, shape, torch.float32)

    def matrix(self, name: str, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """A weight [N, K]: grouped codes when stored so and the mode keeps them, else dense."""
        return self._done(name, self._decode(self._find(name, shape), self._on_load))

    def stack(self, name: str, shape: tuple[int, int, int]) -> list[GroupedWeight | Tensor]:
        """The E weights [N, K] of one tensor [E, N, K], in order, each as `matrix` gives it."""
        return list(self.members(name, shape))

    def members(
        self, name: str, shape: tuple[int, int, int], *, transposed: bool = False
    ) -> Iterator[GroupedWeight | Tensor]:
        """The same one after another. `transposed`: plain numbers are stored as [E, K, N]."""
        count, n, k = shape
        turned = transposed and not self._store.scheme_of(name)
        found = self._find(name, (count, k, n) if turned else shape)
        for index in range(count):
            member = found.member(index, count)
            weight = self._decode(member, self._on_load, turned=turned)
            yield self._done(name, weight)

    def linear(self, names: Sequence[str], sizes: Sequence[int], in_features: int) -> Linear:
        """One layer of the projections `<name>.weight`, with their biases where stored."""
        weights = [
            self.matrix(f"{name}.weight", (size, in_features))
            for name, size in zip(names, sizes, strict=True)
        ]
        return fused_linear(weights, self.biases(names, sizes))

    def biases(self, names: Sequence[str], sizes: Sequence[int]) -> list[Tensor | None]:
        """`<name>.bias` of each projection, None where the bundle has none."""
        return [
            self.optional_vector(f"{name}.bias", size, self.dtype)
            for name, size in zip(names, sizes, strict=True)
        ]

    def is_copy(self, name: str, other: str) -> bool:
        """Whether two stored matrices hold the same values, so that one can serve as both."""
        return self._store.are_equal(name, other)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """Token vectors or a head. Its rows are decoded a few at a time where they can be."""
        matrix = self._find(name, (vocab_size, hidden_size))
        on_load: QuantizeOnLoad | None = "int8" if self._on_load else None
        if matrix.has_row_access and isinstance(self._decode(matrix, on_load, slice(0, 1)), Tensor):
            native = self._native_embedding(matrix)
            if native is not None:
                return self._done(name, native)
        if self._mode == "float32" or not matrix.has_row_access:
            weight = self._decode(matrix, on_load)
        else:
            weight = self._undecoded(matrix, on_load)
        if not isinstance(weight, Tensor):
            return self._done(name, grouped_embedding(weight))
        return self._done(name, DenseEmbedding(weight))

    def _native_embedding(self, matrix: StoredMatrix) -> Embedding | None:
        """A matrix in plain numbers for native kernels, a few rows at a time: as a whole it
        would for a moment be there twice."""
        n, k = matrix.shape
        if self._mode == "float32" or self.device.type != "cpu" or not can_hold(n, k):
            return None

        def read(rows: slice) -> Tensor:
            piece = self._decode(matrix, None, rows)
            assert isinstance(piece, Tensor)  # as its first row was
            return piece

        return NativeEmbedding(plain_matrix((n, k), read))

    def finish(self) -> None:
        """Raise `UnsupportedBundle` when tensors are left that nobody asked for: the config
        would describe another network than the weights."""
        if self._left:
            names = sorted(self._left)
            shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
            raise UnsupportedBundle(f"{len(names)} unexpected tensors in the weights: {shown}")

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredMatrix:
        """Tick the name off. Raises as `MatrixStore.find` does, also for a name asked twice."""
        if not self.has(name):
            raise missing(name)
        found = self._store.find(name, shape)
        self.skip(name)
        return found

    def _plain(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self.has(name):
            raise missing(name)
        stored = self._store.tensor(name, shape)
        self.skip(name)
        if gguf.is_quantized(stored.encoding):
            raise UnsupportedBundle(f"quantized tensor {name} of shape {shape}")
        value = typed(stored).to(self.device, dtype, copy=True)
        if not value.isfinite().all():
            raise UnsupportedBundle(f"tensor {name}: it has values that are not finite numbers")
        return self._done(name, value)

    def _decode(
        self,
        matrix: StoredMatrix,
        on_load: QuantizeOnLoad | None,
        rows: slice | None = None,
        *,
        turned: bool = False,
    ) -> GroupedWeight | Tensor:
        weight = matrix.decode(rows)
        if turned and isinstance(weight, Tensor):
            weight = weight.t()
        shape = (weight.shape[0], weight.shape[1])
        if isinstance(weight, Tensor) and on_load and can_quantize(shape, on_load):
            weight = quantize(weight, on_load)
            if not weight.is_finite():
                raise UnsupportedBundle(
                    f"tensor {matrix.name}: it has values that are not finite numbers"
                )
        if isinstance(weight, Tensor):
            return self._copy(matrix, weight)
        if self._mode == "float32":
            return weight.dequantize(torch.float32).to(self.device)
        return weight.to(self.device)

    def _copy(self, matrix: StoredMatrix, weight: Tensor) -> Tensor:
        """The weight in the compute dtype. What is stored as it is lies on the file's pages,
        which are read-only and go away: they are given back as the copy proceeds."""
        if matrix.scheme is not None:
            return weight.to(self.device, self.dtype)
        out = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        for rows in slab_rows(*weight.shape, weights=_COPY_SLAB):
            out[rows] = weight[rows]
            self._store.release(matrix.name)
        return out

    def _undecoded(
        self, matrix: StoredMatrix, on_load: QuantizeOnLoad | None
    ) -> UndecodedWeight | Tensor:
        def read(rows: slice) -> GroupedWeight:
            piece = self._decode(matrix, on_load, rows)
            assert isinstance(piece, GroupedWeight)  # as its first row was
            self._store.release(matrix.name)
            self._count(piece.codes.numel())
            return piece

        first = self._decode(matrix, on_load, slice(0, 1))
        if isinstance(first, Tensor):
            whole = self._decode(matrix, None)
            assert isinstance(whole, Tensor)
            return whole
        return UndecodedWeight(
            shape=matrix.shape,
            bits=first.bits,
            group_size=first.group_size,
            device=self.device,
            read=read,
        )

    def _done(self, name: str, value: _T) -> _T:
        """`value`, now that nothing reads the stored tensor any more."""
        self._count(self._store.release(name))
        return value

    def _count(self, num_bytes: int) -> None:
        self._read_bytes += num_bytes
        if self._read_bytes >= _TRIM_EVERY_BYTES:
            self._read_bytes = 0
            trim_heap()


class ShapeLoader(WeightLoader):
    """Checks what a family asks for against the bundle and hands out hollow tensors: a family
    that was loaded from this one has shown that the weights fit it, at the price of some
    milliseconds and no memory to speak of."""

    def __init__(self, source: WeightSource, mode: ComputeMode, schemes: Schemes) -> None:
        super().__init__(source, mode, schemes=schemes)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) != 2:
            return self._plain(name, shape, torch.float32)
        self._find(name, shape)
        return hollow(shape, torch.float32)

    def is_copy(self, name: str, other: str) -> bool:
        return False  # values are not looked at; both must fit

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        matrix = self._find(name, (vocab_size, hidden_size))
        return DenseEmbedding(self._decode(matrix, None))

    def _plain(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self.has(name):
            raise missing(name)
        self._store.tensor(name, shape)
        self.skip(name)
        return hollow(shape, dtype)

    def _decode(
        self,
        matrix: StoredMatrix,
        on_load: QuantizeOnLoad | None,
        rows: slice | None = None,
        *,
        turned: bool = False,
    ) -> Tensor:
        return hollow(matrix.shape, self.dtype)

    def _done(self, name: str, value: _T) -> _T:
        return value
