"""Matrices of a bundle as they are stored: which tensors make one up, whether those fit, and
their decoding.

A matrix is one tensor (plain numbers or GGUF blocks), or the parts of a `Scheme` that lie
beside each other. In: names that a family asks for (`model.layers.0.mlp.up_proj.weight`). Out:
grouped codes or plain numbers on the CPU. The pages of what was decoded are given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from osaurus.bundle.weights import StoredTensor, WeightSource
from osaurus.errors import IncompleteBundle, UnsupportedBundle
from osaurus.quant import gguf
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.mxfp4 import Mxfp4, spelled_as_parts
from osaurus.quant.scheme import DTYPES, Scheme
from osaurus.quant.schemes import Schemes

#: Encodings of plain numbers.
DENSE = ("F32", "F16", "BF16")
_SUFFIX = ".weight"


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """`parts` by suffix (`weight`, `scales`, ...); `scheme` None: one tensor under `weight`.

    `shape` is (N, K), that of one matrix where several are stacked along a first dimension.
    """

    name: str
    shape: tuple[int, int]
    scheme: Scheme | None
    parts: Mapping[str, StoredTensor]

    @property
    def has_row_access(self) -> bool:
        """Whether a few output features can be decoded alone."""
        return self.scheme is None or self.scheme.rows_first

    def decode(self, rows: slice | None = None) -> GroupedWeight | Tensor:
        """The weight, or those of its rows; plain numbers as they are stored, as a view.

        Raises `UnsupportedBundle` naming the tensor when the format cannot be read or a scale
        is not a finite number.
        """
        n, k = self.shape
        shape = (n, k) if rows is None else (rows.stop - rows.start, k)
        parts = self.parts if rows is None else self._rows(rows)
        try:
            if self.scheme is not None:
                weight = self.scheme.decode({s: typed(p) for s, p in parts.items()}, shape)
            elif gguf.is_quantized((stored := parts["weight"]).encoding):
                weight = gguf.decode(stored.encoding, stored.data, shape)
            else:
                weight = typed(stored)
        except UnsupportedBundle as error:
            raise UnsupportedBundle(f"tensor {self.name}: {error.message}") from None
        if isinstance(weight, GroupedWeight) and not weight.is_finite():
            raise UnsupportedBundle(
                f"tensor {self.name}: it has a scale that is not a finite number; the file is "
                "damaged or was quantized wrongly"
            )
        return weight

    def member(self, index: int, count: int) -> StoredMatrix:
        """One of `count` matrices that are stacked along a first dimension."""
        return replace(self, parts={s: _member(p, index, count) for s, p in self.parts.items()})

    def _rows(self, rows: slice) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for suffix, part in self.parts.items():
            if part.shape[:1] == self.shape[:1]:
                size = part.data.numel() // part.shape[0]
                shape = (rows.stop - rows.start, *part.shape[1:])
                data = part.data[rows.start * size : rows.stop * size]
                part = replace(part, shape=shape, data=data)
            found[suffix] = part
        return found


class PartsSource:
    """A bundle's weights under the names that the parts of its matrices have here, where the
    bundle joins them otherwise."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        """`names`: stored names by those they go by."""
        self._source, self._stored = source, names

    @property
    def total_bytes(self) -> int:
        return self._source.total_bytes

    def names(self) -> list[str]:
        return list(self._stored)

    def get(self, name: str) -> StoredTensor:
        return self._source.get(self._stored.get(name, name))

    def release(self, name: str) -> None:
        self._source.release(self._stored[name])

    def close(self) -> None:
        self._source.close()


def as_parts(source: WeightSource, schemes: Schemes) -> WeightSource:
    """`source`, each part of a matrix under the matrix's own path."""
    if isinstance(schemes.default, Mxfp4):
        return PartsSource(source, spelled_as_parts(source.names()))
    return source


class MatrixStore:
    """Finds and checks a bundle's matrices. Decodes nothing."""

    def __init__(self, source: WeightSource, schemes: Schemes | None = None) -> None:
        self._source = source
        self._names = frozenset(source.names())
        self._schemes = schemes or Schemes()

    def scheme_of(self, name: str) -> Scheme | None:
        """How the matrix `name` is quantized beside its file format, if it is."""
        path = name.removesuffix(_SUFFIX)
        scheme = self._schemes.of(path)
        return scheme if scheme and f"{path}.{scheme.marker}" in self._names else None

    def names_of(self, name: str) -> list[str]:
        """The stored tensors that `name` is made of, those that nothing here needs included;
        `name` itself where it is no quantized matrix."""
        scheme = self.scheme_of(name)
        if scheme is None:
            return [name]
        path = name.removesuffix(_SUFFIX)
        suffixes = [*scheme.parts(*_ANY_SHAPE), *scheme.ignored]
        return [part for suffix in suffixes if (part := f"{path}.{suffix}") in self._names]

    def find(self, name: str, shape: tuple[int, ...]) -> StoredMatrix:
        """The matrix [N, K], or the stack of them [E, N, K].

        Raises `IncompleteBundle` for a part that is missing and `UnsupportedBundle` for one of
        another shape or type, each named with both.
        """
        *stack, n, k = shape
        scheme, path = self.scheme_of(name), name.removesuffix(_SUFFIX)
        if scheme is None:
            stored = self.tensor(name, shape)
            return StoredMatrix(name, (n, k), None, {"weight": stored})
        try:
            wanted = scheme.parts(n, k)
        except UnsupportedBundle as error:
            raise UnsupportedBundle(f"tensor {name} ({scheme}): {error.message}") from None
        parts: dict[str, StoredTensor] = {}
        for suffix, part in wanted.items():
            full = f"{path}.{suffix}"
            if full not in self._names:
                if part.optional:
                    continue
                raise missing(full)
            stored = self._source.get(full)
            shapes = [(*stack, *each) for each in part.shapes]
            if tuple(stored.shape) not in shapes or stored.encoding not in part.dtypes:
                raise UnsupportedBundle(
                    f"tensor {full} has shape {tuple(stored.shape)} and type {stored.encoding}, "
                    f"{scheme} asks for {shapes[0]} and {' or '.join(part.dtypes)}"
                )
            parts[suffix] = stored
        return StoredMatrix(name, (n, k), scheme, parts)

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A single tensor. Raises as `find` does."""
        if name not in self._names:
            raise missing(name)
        stored = self._source.get(name)
        if tuple(stored.shape) != shape:
            raise UnsupportedBundle(
                f"tensor {name} has shape {tuple(stored.shape)}, the config asks for {shape}"
            )
        if stored.encoding not in DENSE and not gguf.is_quantized(stored.encoding):
            raise UnsupportedBundle(
                f"tensor {name}: encoding {stored.encoding} is not supported here; either it is "
                "not supported at all or its scales are missing"
            )
        return stored

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two matrices are stored in the same form with the same values."""
        first, second = self.names_of(name), self.names_of(other)
        if len(first) != len(second):
            return False
        for one, two in zip(first, second, strict=True):
            a, b = self._source.get(one), self._source.get(two)
            if a.encoding != b.encoding or not torch.equal(a.data, b.data):
                return False
        return True

    def release(self, name: str) -> int:
        """Give back the pages of everything that `name` is made of; its bytes as stored."""
        num_bytes = 0
        for part in self.names_of(name):
            num_bytes += self._source.get(part).data.numel()
            self._source.release(part)
        return num_bytes


#: Parts have the same names whatever the shape; this one every format divides.
_ANY_SHAPE = (4096, 4096)


def missing(name: str) -> IncompleteBundle:
    return IncompleteBundle(
        f"tensor {name} is missing from the weights; the bundle looks unfinished"
    )


def _member(stored: StoredTensor, index: int, count: int) -> StoredTensor:
    size = stored.data.numel() // count
    data = stored.data[index * size : (index + 1) * size]
    return replace(stored, shape=stored.shape[1:], data=data)


def typed(stored: StoredTensor) -> Tensor:
    """The tensor in its own type and shape over the file's pages: only to be read. One that
    lies where its type must not be read is copied."""
    dtype = DTYPES[stored.encoding]
    data = stored.data
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(stored.shape)
