"""Stored tensors of a bundle under their Hugging Face names, as views of mapped files.

In: a folder with safetensors or the parts of a GGUF. Out: `StoredTensor`s whose `data` is the
file's own pages: nothing is read until it is touched, nothing is copied, nothing is decoded.
What the bytes mean is the affair of `quant/`.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from osaurus.bundle.gguf_config import gguf_architecture
from osaurus.bundle.gguf_names import hf_name
from osaurus.bundle.gguf_reader import GgufFile, GgufTensor
from osaurus.bundle.safetensors_reader import WeightPlan, plan_weights
from osaurus.errors import BundleError, UnsupportedBundle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """One tensor as it lies on disk.

    `shape` is row-major torch order ([out, in] for a projection) in elements; `encoding` is a
    safetensors dtype ('BF16', 'F8_E4M3', ...) or a GGUF block type ('Q4_1', ...). `data` is
    1-D uint8 over a read-only mapping: writing to it kills the process.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    data: torch.Tensor


class WeightSource(Protocol):
    """Every weight of one bundle. Tensors stay valid after `close`."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    def names(self) -> list[str]: ...

    def get(self, name: str) -> StoredTensor:
        """Raises `BundleError` naming the tensor when the bundle has none of that name."""
        ...

    def release(self, name: str) -> None:
        """Give back the memory that reading a tensor took; its data is read anew if it is
        looked at again."""
        ...

    def close(self) -> None:
        """Let go of the views that this source holds itself."""
        ...


class SafetensorsSource:
    """A folder of safetensors: one file, or shards with an index."""

    def __init__(self, folder: Path, plan: WeightPlan | None = None) -> None:
        """Raises as `plan_weights` does: nothing is handed out from a folder that is not whole."""
        self._folder = folder
        self._plan = plan or plan_weights(folder)
        self._maps: dict[Path, mmap.mmap] = {}
        self._files: dict[Path, torch.Tensor] = {}

    @property
    def total_bytes(self) -> int:
        return self._plan.total_bytes

    def names(self) -> list[str]:
        return list(self._plan.tensors)

    def get(self, name: str) -> StoredTensor:
        try:
            place = self._plan.tensors[name]
        except KeyError:
            raise BundleError(f"{self._folder}: there is no tensor {name!r}") from None
        if place.path not in self._files:
            self._maps[place.path] = _map(place.path)
            self._files[place.path] = _view(self._maps[place.path])
        data = self._files[place.path][place.begin : place.end]
        return StoredTensor(name=name, shape=place.shape, encoding=place.dtype, data=data)

    def release(self, name: str) -> None:
        place = self._plan.tensors[name]
        if place.path in self._maps:
            _drop_pages(self._maps[place.path], place.begin, place.end)

    def close(self) -> None:
        self._files.clear()
        self._maps.clear()


class GgufSource:
    """One GGUF or all parts of a split one, under Hugging Face names."""

    def __init__(self, parts: Sequence[GgufFile]) -> None:
        """`parts` in order; raises `UnsupportedBundle` for a tensor that no table names."""
        self._parts = tuple(parts)
        self._places: dict[str, tuple[GgufFile, GgufTensor]] = {}
        self._files: dict[Path, torch.Tensor] = {}
        architecture = gguf_architecture(self._parts[0])
        for part in self._parts:
            for tensor in part.tensors.values():
                try:
                    name = hf_name(architecture, tensor.name)
                except (KeyError, ValueError):
                    raise UnsupportedBundle(
                        f"{part.path}: tensor {tensor.name!r} is unknown for model type "
                        f"{architecture.model_type!r}"
                    ) from None
                if name is not None:
                    self._places[name] = (part, tensor)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.num_bytes for _, tensor in self._places.values())

    def names(self) -> list[str]:
        return list(self._places)

    def get(self, name: str) -> StoredTensor:
        try:
            part, tensor = self._places[name]
        except KeyError:
            raise BundleError(f"{self._parts[0].path}: there is no tensor {name!r}") from None
        if part.path not in self._files:
            self._files[part.path] = _view(part.mapping)
        data = self._files[part.path][tensor.offset : tensor.offset + tensor.num_bytes]
        shape = tuple(reversed(tensor.dims))
        return StoredTensor(name=name, shape=shape, encoding=tensor.type.name, data=data)

    def release(self, name: str) -> None:
        part, tensor = self._places[name]
        _drop_pages(part.mapping, tensor.offset, tensor.offset + tensor.num_bytes)

    def close(self) -> None:
        self._files.clear()


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BundleError(f"{path}: cannot be mapped: {error.strerror}") from error


def _drop_pages(mapping: mmap.mmap, begin: int, end: int) -> None:
    """Take the whole pages within [begin, end) out of this process's memory. They stay in the
    system's cache; without this a model would for a moment count twice, as stored and as loaded."""
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def _view(mapping: mmap.mmap) -> torch.Tensor:
    """The whole mapping as one uint8 tensor, which keeps the mapping alive.

    A private writable mapping would need no warning filter, but the kernel counts it against
    the memory limit as if every page were dirty, and refuses models larger than RAM.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)
