"""Records: what the disk tier keeps of a prefix, as tensors, and their way to and from a file.

A *run* is consecutive KV blocks of all layers; a *snapshot* is what recurrent layers
remember at one token. What the tensors mean is the caller's affair and goes into `meta`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from osaurus.cache.record_file import (
    RecordHeader,
    RecordKind,
    TensorEntry,
    build_header,
    identity_problem,
    read_data,
    read_header,
)

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One unit of the disk tier, found whole or not at all.

    `key`: 32 hex digits, unlike any other record's, runs and snapshots together.
    `namespace`: hex of what makes two caches different (model key and salt); `model` is for
    people to read. Tokens `[first_token, end_token)`; for a snapshot both are its boundary.
    `blocks`: the chained 32-byte digest of each block in order; one digest for a snapshot.
    `parent`: the digest of the block before a run, or of the last whole block a snapshot
    follows; empty at the start. It keeps parents from being evicted before what needs them.
    `tensors`: on the CPU, contiguous, left alone until the record is on disk.

    Raises ValueError for an identity that breaks these rules.
    """

    key: str
    namespace: str
    model: str
    kind: RecordKind
    first_token: int
    end_token: int
    blocks: tuple[bytes, ...]
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, str] = field(default_factory=dict)
    parent: bytes = b""

    def __post_init__(self) -> None:
        if problem := identity_problem(self):
            raise ValueError(problem)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def encode(record: Record, created: str) -> tuple[bytearray, list[memoryview]]:
    """Header without its checksum, and the data that follows it, not copied.

    `created` is a timestamp of fixed width, so that the size depends on the record alone.
    Raises `CorruptRecord` for a record beyond the format's limits, ValueError for a tensor
    that is not contiguous on the CPU or of an unknown dtype.
    """
    entries: dict[str, TensorEntry] = {}
    data: list[memoryview] = []
    end = 0
    # Widest elements first: everything is aligned without padding, which the format forbids.
    for name, tensor in sorted(record.tensors.items(), key=lambda item: -item[1].itemsize):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"tensor {name} is not contiguous on the CPU")
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {name} has the dtype {tensor.dtype}, which has no name")
        begin, end = end, end + tensor.nbytes
        entries[name] = TensorEntry(_NAMES[tensor.dtype], tuple(tensor.shape), begin, end)
        if tensor.nbytes:
            data.append(tensor.detach().view(-1).view(torch.uint8).numpy().data)
    header = RecordHeader(
        key=record.key,
        namespace=record.namespace,
        model=record.model,
        kind=record.kind,
        first_token=record.first_token,
        end_token=record.end_token,
        parent=record.parent,
        blocks=record.blocks,
        created=created,
        meta=record.meta,
        tensors=entries,
        data_bytes=end,
        checksum="",
    )
    return build_header(header), data


def read_record(path: str | os.PathLike[str], expected_bytes: int | None = None) -> Record:
    """Read and check one file; its tensors share one buffer, and nothing with the file.

    Raises `CorruptRecord` when anything differs from what was written; OSError.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        raw, header = read_header(fd, expected_bytes)
        buffer = torch.empty(header.data_bytes, dtype=torch.uint8)
        read_data(fd, raw, header, buffer.numpy().data)
    finally:
        os.close(fd)
    return Record(
        key=header.key,
        namespace=header.namespace,
        model=header.model,
        kind=header.kind,
        first_token=header.first_token,
        end_token=header.end_token,
        blocks=header.blocks,
        parent=header.parent,
        meta=header.meta,
        tensors={name: _tensor(buffer, entry) for name, entry in header.tensors.items()},
    )


def _tensor(buffer: Tensor, entry: TensorEntry) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    return buffer[entry.begin : entry.end].view(dtype).view(entry.shape)
