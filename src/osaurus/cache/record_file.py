"""The bytes of one KV record: a safetensors file that names itself and proves itself whole.

In: paths and file descriptors. Out: a checked `RecordHeader`, and data that matches its
checksum. Nothing in a header is believed before it fits the limits below and the file's
real size. Knows no tensors, so that listing and verifying need no torch.

The checksum is SHA-256 over the length prefix, the header with 64 zeros in the checksum's
place, and the data: any flipped bit shows. hashlib lets other threads run meanwhile and
takes 0.55 s a GB where the processor has SHA instructions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

RecordKind = Literal["run", "snapshot"]

FORMAT = "osaurus-kv"
VERSION = "1"
PIECE_BYTES = 1 << 20  #: read, hashed and written at a time
DIGEST_BYTES = 32

MAX_HEADER_BYTES = 64 << 20
MAX_DIMS = 6
MAX_DIM = 262_144
MAX_TENSOR_BYTES = 4 << 30
MAX_DATA_BYTES = 16 << 30

#: Bytes an element, by the format's own dtype names.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

_NO_CHECKSUM = "0" * 64
_META = "meta."
_KEY = re.compile(r"[0-9a-f]{32}")
_HEX = re.compile(r"[0-9a-f]*")


class CorruptRecord(ValueError):
    """A record's file is not what was written. The message says what does not fit."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Bytes `[begin, end)` of the data; an empty range is a tensor without elements."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """What a record says of itself; fields as in `records.Record`."""

    key: str
    namespace: str
    model: str
    kind: RecordKind
    first_token: int
    end_token: int
    parent: bytes
    blocks: tuple[bytes, ...]
    created: str
    meta: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]
    data_bytes: int
    checksum: str


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def build_header(header: RecordHeader) -> bytearray:
    """Length prefix and JSON, without the checksum: `stamp_checksum` puts that in.

    `header.tensors` are in the order of their data. Raises `CorruptRecord` for what
    `parse_header` would refuse, so that nothing is written that cannot be read.
    """
    absent = {
        name: [entry.dtype, entry.shape]
        for name, entry in header.tensors.items()
        if entry.begin == entry.end
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "key": header.key,
        "namespace": header.namespace,
        "model": header.model,
        "kind": header.kind,
        "first_token": str(header.first_token),
        "end_token": str(header.end_token),
        "parent": header.parent.hex(),
        "blocks": "".join(digest.hex() for digest in header.blocks),
        "created": header.created,
        "checksum": _NO_CHECKSUM,
        "absent": json.dumps(absent),
        **{_META + name: value for name, value in header.meta.items()},
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    for name, entry in header.tensors.items():
        if name not in absent:
            offsets = [entry.begin, entry.end]
            entries[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    if len(entries) + len(absent) != len(header.tensors) + 1:
        raise CorruptRecord("a tensor is called __metadata__")
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = bytearray(len(text).to_bytes(8, "little") + text)
    parse_header(raw, len(raw) + header.data_bytes)
    return raw


def checksum_offset(raw: bytes | bytearray) -> int:
    """Where in a header built above the checksum's 64 characters go."""
    return raw.index(b'"checksum":"') + len(b'"checksum":"')


def parse_header(raw: bytes | bytearray, file_size: int) -> RecordHeader:
    """Check length prefix and JSON against the limits and the file's size.

    Raises `CorruptRecord`. The checksum is not looked at: `read_data` does that.
    """
    try:
        found = json.loads(raw[8:])
        metadata = found.pop("__metadata__")
        texts = all(isinstance(value, str) for value in metadata.values())
        if not texts or metadata["format"] != FORMAT or metadata["version"] != VERSION:
            raise CorruptRecord(f"not a record of version {VERSION}")
        data_bytes = file_size - len(raw)
        tensors = {name: _entry(name, entry) for name, entry in found.items()}
        _check_ranges(tensors, data_bytes)
        for name, (dtype, shape) in json.loads(metadata["absent"]).items():
            tensors[name] = _absent(name, dtype, shape)
        header = RecordHeader(
            key=metadata["key"],
            namespace=metadata["namespace"],
            model=metadata["model"],
            kind=metadata["kind"],
            first_token=int(metadata["first_token"]),
            end_token=int(metadata["end_token"]),
            parent=bytes.fromhex(metadata["parent"]),
            blocks=_digests(metadata["blocks"]),
            created=metadata["created"],
            meta={
                name.removeprefix(_META): value
                for name, value in metadata.items()
                if name.startswith(_META)
            },
            tensors=tensors,
            data_bytes=data_bytes,
            checksum=metadata["checksum"],
        )
    except CorruptRecord:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRecord(f"its header cannot be read: {error!r}") from error
    if problem := identity_problem(header):
        raise CorruptRecord(problem)
    return header


def identity_problem(record: Any) -> str:
    """What is wrong with the name and place of a `RecordHeader` or `Record`; "" if nothing."""
    if not is_key(record.key):
        return f"the key {record.key!r} is not 32 hex digits"
    if not record.namespace or not _HEX.fullmatch(record.namespace):
        return f"the namespace {record.namespace!r} is not hex"
    if record.kind not in ("run", "snapshot"):
        return f"the kind {record.kind!r} is neither run nor snapshot"
    if not 0 <= record.first_token <= record.end_token:
        return f"tokens {record.first_token} to {record.end_token} are no range"
    if any(len(digest) != DIGEST_BYTES for digest in record.blocks):
        return "a block's digest is not 32 bytes"
    if record.parent and len(record.parent) != DIGEST_BYTES:
        return "the parent's digest is not 32 bytes"
    if not record.blocks or (record.kind == "snapshot" and len(record.blocks) != 1):
        return f"a {record.kind} with {len(record.blocks)} digests"
    return ""


def read_header(fd: int, expected_bytes: int | None = None) -> tuple[bytes, RecordHeader]:
    """Raw and checked header of an open file, read from its start.

    Raises `CorruptRecord`, also when the file's size is not `expected_bytes`; OSError.
    """
    size = os.fstat(fd).st_size
    if expected_bytes is not None and size != expected_bytes:
        raise CorruptRecord(f"{size} bytes instead of {expected_bytes}")
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise CorruptRecord(f"only {size} bytes")
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptRecord(f"a header of {length} bytes in a file of {size}")
    raw = os.pread(fd, 8 + length, 0)
    if len(raw) != 8 + length:
        raise CorruptRecord("it became shorter while it was read")
    return raw, parse_header(raw, size)


def read_data(fd: int, raw: bytes, header: RecordHeader, out: memoryview | None = None) -> None:
    """Read all data into `out` (header.data_bytes long) and hold it to the checksum.

    Without `out` the data is only checked. Reads rather than maps: a bad sector or a file
    cut short is then an error here and not a signal that ends the process, at the same
    speed. Raises `CorruptRecord`; OSError.
    """
    digest = hashlib.sha256(raw.replace(header.checksum.encode(), _NO_CHECKSUM.encode(), 1))
    piece = memoryview(bytearray(PIECE_BYTES)) if out is None else out
    done = 0
    while done < header.data_bytes:
        at = done if out is not None else 0
        part = piece[at : at + min(PIECE_BYTES, header.data_bytes - done)]
        count = os.preadv(fd, [part], len(raw) + done)
        if count == 0:
            raise CorruptRecord("it became shorter while it was read")
        digest.update(part[:count])
        done += count
    if digest.hexdigest() != header.checksum:
        raise CorruptRecord("the checksum does not match")


def verify_file(path: str | os.PathLike[str], expected_bytes: int | None = None) -> RecordHeader:
    """Check a whole file. Raises `CorruptRecord`; OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        raw, header = read_header(fd, expected_bytes)
        read_data(fd, raw, header)
        return header
    finally:
        os.close(fd)


def _entry(name: str, entry: Any) -> TensorEntry:
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], entry["shape"]
    size = _size(name, dtype, shape)
    if type(begin) is not int or type(end) is not int or not 0 <= begin < end:
        raise CorruptRecord(f"tensor {name} has no range")
    if end - begin != size or begin % ITEM_BYTES[dtype]:
        raise CorruptRecord(f"tensor {name} of {size} bytes lies at {begin} to {end}")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _absent(name: str, dtype: Any, shape: Any) -> TensorEntry:
    if _size(name, dtype, shape):
        raise CorruptRecord(f"tensor {name} has elements and no data")
    return TensorEntry(dtype, tuple(shape), 0, 0)


def _size(name: str, dtype: Any, shape: Sequence[Any]) -> int:
    if dtype not in ITEM_BYTES:
        raise CorruptRecord(f"tensor {name} has the unknown dtype {dtype!r}")
    size = ITEM_BYTES[dtype]
    if len(shape) > MAX_DIMS:
        raise CorruptRecord(f"tensor {name} has {len(shape)} dimensions")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= MAX_DIM:
            raise CorruptRecord(f"tensor {name} has the dimension {dim!r}")
        size *= dim
    if size > MAX_TENSOR_BYTES:
        raise CorruptRecord(f"tensor {name} takes {size} bytes")
    return size


def _check_ranges(tensors: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """The ranges follow each other without gap or overlap and end where the file ends."""
    if not 0 <= data_bytes <= MAX_DATA_BYTES:
        raise CorruptRecord(f"{data_bytes} bytes of data")
    at = 0
    for entry in sorted(tensors.values(), key=lambda entry: entry.begin):
        if entry.begin != at:
            raise CorruptRecord(f"tensors overlap or leave a gap at byte {at}")
        at = entry.end
    if at != data_bytes:
        raise CorruptRecord(f"tensors of {at} bytes in {data_bytes} bytes of data")


def _digests(text: str) -> tuple[bytes, ...]:
    raw = bytes.fromhex(text)
    return tuple(raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES))
