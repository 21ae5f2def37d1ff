"""The header of a GGUF file: its metadata and the table of its tensors.

In: a path. Out: a `GgufFile` over a read-only mapping, checked against the file's real size,
so that nobody downstream meets a range that is not there. Long arrays (tokens, merges) are
stepped over and decoded on first use. Knows nothing of architectures or of what bytes mean.

Format: docs/gguf.md of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from osaurus.bundle.encodings import GGML_TYPES, BlockType
from osaurus.errors import BundleError, DamagedBundle, IncompleteBundle, UnsupportedBundle

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 8  #: ggml allows 4; more than 8 can only be damage
_MAX_NESTING = 4  #: arrays of arrays are legal and unused; deeper ones can only be damage

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from

_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Metadata value type -> struct code. Bool is one byte; string and array have their own shape.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_SCALARS[_BOOL] = "?"
_READ_SCALAR = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}


class GgufArray(Sequence[Any]):
    """A metadata array that stays in the file. Its length is free; every look into it decodes
    all of it anew, so that a vocabulary's megabytes live only as long as their reader."""

    __slots__ = ("_buffer", "_count", "_kind", "_offset", "_path")

    def __init__(self, path: Path, buffer: mmap.mmap, kind: int, count: int, offset: int) -> None:
        self._path = path
        self._buffer = buffer
        self._kind = kind
        self._count = count
        self._offset = offset

    def values(self) -> list[Any]:
        """Every item. Raises `BundleError` for text that is not UTF-8."""
        return self._strings() if self._kind == _STRING else self._numbers()

    def _numbers(self) -> list[Any]:
        code = _SCALARS[self._kind]
        return list(struct.unpack_from(f"<{self._count}{code}", self._buffer, self._offset))

    def _strings(self) -> list[str]:
        buffer, position = self._buffer, self._offset
        found: list[str] = []
        try:
            for _ in range(self._count):
                start = position + 8
                position = start + _U64(buffer, position)[0]
                found.append(buffer[start:position].decode())
        except UnicodeDecodeError as error:
            raise DamagedBundle(
                f"{self._path}: metadata text number {len(found)} of an array is not UTF-8 "
                f"({error.reason}); the file is damaged"
            ) from error
        return found

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.values()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __repr__(self) -> str:
        return f"GgufArray({self._count} items of type {self._kind})"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. `dims` is ggml's order: the contiguous one first.

    `offset` counts from the start of the file.
    """

    name: str
    dims: tuple[int, ...]
    type: BlockType
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF. `metadata` and `tensors` are complete and checked when this exists.

    The mapping lives as long as anything that views it; `close` only drops this object's hold.
    """

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        version: int,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, GgufTensor],
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self.size_bytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping

    @property
    def mapping(self) -> mmap.mmap:
        if self._mapping is None:
            raise BundleError(f"{self.path}: the file was closed")
        return self._mapping

    def read(self, tensor: GgufTensor) -> bytes:
        """A copy of a small tensor's bytes; large ones are viewed through `weights.py`."""
        return self.mapping[tensor.offset : tensor.offset + tensor.num_bytes]

    def close(self) -> None:
        self._mapping = None


def read_gguf(path: Path) -> GgufFile:
    """Map `path` and read its header.

    Raises `IncompleteBundle` when the file ends before what its header promises, and
    `UnsupportedBundle` or `BundleError` when it is no GGUF, of another version or damaged.
    """
    mapping = _map(path)
    return _Header(path, mapping).read()


def is_gguf(path: Path) -> bool:
    """True when the file starts with GGUF's magic. Unreadable files are not GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise IncompleteBundle(f"{path}: the file does not exist") from error
    except ValueError as error:  # mmap refuses an empty file
        raise IncompleteBundle(
            f"{path}: the file is empty; it looks like an unfinished download"
        ) from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error


class _Header:
    """A cursor over the header that turns every overrun into one clear error."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.buffer = mapping
        self.size = len(mapping)
        self.position = 0

    def read(self) -> GgufFile:
        version = self._magic_and_version()
        try:
            num_tensors = self._count(least_bytes=24, what="tensors")
            num_entries = self._count(least_bytes=12, what="metadata entries")
            metadata = self._metadata(num_entries)
            rows = [self._tensor_row() for _ in range(num_tensors)]
        except (struct.error, OverflowError) as error:
            raise self._truncated("its header goes on past the end of the file") from error
        except UnicodeDecodeError as error:
            raise DamagedBundle(f"{self.path}: a name in the header is not UTF-8") from error
        tensors = self._place(rows, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        return GgufFile(self.path, self.buffer, version, metadata, tensors)

    def _magic_and_version(self) -> int:
        magic = self.buffer[:4]
        if not _MAGIC.startswith(magic):
            if not any(magic):
                raise self._truncated("it starts with zeros instead of GGUF's magic")
            raise UnsupportedBundle(
                f"{self.path}: not a GGUF file (it starts with {magic!r}, not {_MAGIC!r})"
            )
        if self.size < 24:
            raise self._truncated(f"its {self.size} bytes do not hold a GGUF header")
        version = _U32(self.buffer, 4)[0]
        self.position = 8
        if version in (2 << 24, 3 << 24):
            raise UnsupportedBundle(
                f"{self.path}: a big-endian GGUF; convert it for little-endian machines"
            )
        if version not in (2, 3):
            raise UnsupportedBundle(
                f"{self.path}: GGUF version {version} is not supported (2 and 3 are)"
            )
        return version

    def _count(self, *, least_bytes: int, what: str) -> int:
        """A count that the rest of the file could hold, so that no loop runs for years."""
        count = self._u64()
        if count * least_bytes > self.size:
            raise self._truncated(f"it claims {count} {what}, more than its {self.size} bytes hold")
        return count

    def _u32(self) -> int:
        value = _U32(self.buffer, self.position)[0]
        self.position += 4
        return value

    def _u64(self) -> int:
        value = _U64(self.buffer, self.position)[0]
        self.position += 8
        return value

    def _text(self) -> str:
        length = self._u64()
        end = self.position + length
        if end > self.size:
            raise self._truncated("a text in its header goes past the end of the file")
        value = self.buffer[self.position : end].decode()
        self.position = end
        return value

    def _metadata(self, num_entries: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text()
            if key in metadata:
                raise DamagedBundle(f"{self.path}: metadata key {key!r} appears twice")
            metadata[key] = self._value(self._u32(), key)
        return metadata

    def _value(self, kind: int, key: str, nesting: int = 0) -> Any:
        if scalar := _READ_SCALAR.get(kind):
            value = scalar.unpack_from(self.buffer, self.position)[0]
            self.position += scalar.size
            return value
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY and nesting < _MAX_NESTING:
            return self._array(key, nesting)
        raise DamagedBundle(f"{self.path}: metadata key {key!r} has the unknown type {kind}")

    def _array(self, key: str, nesting: int) -> Sequence[Any]:
        kind = self._u32()
        scalar = _READ_SCALAR.get(kind)
        count = self._count(least_bytes=scalar.size if scalar else 8, what=f"items in {key!r}")
        if kind == _ARRAY:
            return [self._value(_ARRAY, key, nesting + 1) for _ in range(count)]
        start = self.position
        if scalar:
            self.position += count * scalar.size
        elif kind == _STRING:
            self._skip_strings(count)
        else:
            raise DamagedBundle(f"{self.path}: array {key!r} has the unknown item type {kind}")
        if self.position > self.size:
            raise self._truncated(f"the array {key!r} goes past the end of the file")
        return GgufArray(self.path, self.buffer, kind, count, start)

    def _skip_strings(self, count: int) -> None:
        """The only loop that is long: 100k texts in a common file, so nothing but the sum."""
        buffer, position = self.buffer, self.position
        for _ in range(count):
            position += 8 + _U64(buffer, position)[0]
        self.position = position

    def _tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        num_dims = self._u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise DamagedBundle(f"{self.path}: tensor {name!r} has {num_dims} dimensions")
        dims = tuple(self._u64() for _ in range(num_dims))
        return name, dims, self._u32(), self._u64()

    def _place(
        self, rows: list[tuple[str, tuple[int, ...], int, int]], alignment: Any
    ) -> dict[str, GgufTensor]:
        """Turn relative offsets into places in the file and check every range."""
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise DamagedBundle(
                f"{self.path}: general.alignment is {alignment!r}, not a multiple of 8"
            )
        base = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, dims, type_number, offset in rows:
            if name in tensors:
                raise DamagedBundle(f"{self.path}: tensor {name!r} appears twice")
            if offset % alignment:
                raise DamagedBundle(
                    f"{self.path}: tensor {name!r} starts at {offset}, "
                    f"not a multiple of {alignment}"
                )
            block = GGML_TYPES.get(type_number)
            if block is None:
                raise UnsupportedBundle(
                    f"{self.path}: tensor {name!r} has the unknown ggml type {type_number}"
                )
            tensors[name] = GgufTensor(
                name, dims, block, base + offset, self._num_bytes(name, dims, block)
            )
        self._check_ranges(tensors)
        return tensors

    def _num_bytes(self, name: str, dims: tuple[int, ...], block: BlockType) -> int:
        if dims[0] % block.block_elements:
            raise DamagedBundle(
                f"{self.path}: rows of tensor {name!r} have {dims[0]} elements, "
                f"not a multiple of {block.name}'s {block.block_elements}"
            )
        num_elements = 1
        for dim in dims:
            num_elements *= dim
        return block.num_bytes(num_elements)

    def _check_ranges(self, tensors: Mapping[str, GgufTensor]) -> None:
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
            if tensor.offset < end:
                raise IncompleteBundle(
                    f"{self.path}: tensors {previous!r} and {tensor.name!r} overlap; "
                    "the file is damaged, perhaps an unfinished download: fetch it again"
                )
            end, previous = tensor.offset + tensor.num_bytes, tensor.name
        if end > self.size:
            raise self._truncated(
                f"its tensors end at byte {end} but the file has {self.size} "
                f"({end - self.size} bytes are missing, the last tensor is {previous!r})"
            )

    def _truncated(self, why: str) -> IncompleteBundle:
        return IncompleteBundle(
            f"{self.path}: {why}; this looks like an unfinished download, fetch it again"
        )
