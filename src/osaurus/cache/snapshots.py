"""Snapshots of recurrent state at block boundaries, and the newest ones in memory.

A snapshot is whole or it is nothing: it is never trimmed, derived or completed. It belongs to
one boundary, and its key is the digest of the tokens before that boundary, the same digest
that the last block before it has.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

#: What a record says it is; another version is a miss.
RECORD_FORMAT = "osaurus-state"
RECORD_VERSION = "1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSnapshot:
    """One layer's arrays by name, in the order of its topology; float32 on the host."""

    layer: int
    kind: str
    names: tuple[str, ...]
    arrays: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The state of all layers after exactly `num_tokens` tokens. Owns its tensors, and nobody
    writes to them."""

    num_tokens: int
    layers: tuple[LayerSnapshot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes retained."""
        return sum(array.untyped_storage().nbytes() for p in self.layers for array in p.arrays)

    def to_record(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors named `L{layer}.{array}` and metadata. An array without elements is only in
        the metadata: not every reader brings such a tensor back."""
        tensors: dict[str, Tensor] = {}
        layers: list[dict[str, object]] = []
        for part in self.layers:
            fields = list(zip(part.names, part.arrays, strict=True))
            for name, array in fields:
                if array.numel():
                    tensors[f"L{part.layer}.{name}"] = array
            layers.append(
                {
                    "i": part.layer,
                    "kind": part.kind,
                    "arrays": [[name, list(array.shape)] for name, array in fields],
                }
            )
        return tensors, {
            "format": RECORD_FORMAT,
            "version": RECORD_VERSION,
            "token_count": str(self.num_tokens),
            "dtype": "float32",
            "layers": json.dumps(layers, separators=(",", ":")),
        }

    @classmethod
    def from_record(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> Snapshot | None:
        """The snapshot a record holds, its tensors copied; None unless the record is of this
        format and holds exactly the tensors it declares, in float32.

        Whether it fits a model is `StatePool.accepts`'s question.
        """
        if (meta.get("format"), meta.get("version")) != (RECORD_FORMAT, RECORD_VERSION):
            return None
        try:
            num_tokens = int(meta["token_count"])
            layers = tuple(_read_layer(entry, tensors) for entry in json.loads(meta["layers"]))
        except (KeyError, TypeError, ValueError):
            return None
        declared = sum(array.numel() > 0 for part in layers for array in part.arrays)
        if declared != len(tensors) or not layers or num_tokens < 0:
            return None
        return cls(num_tokens=num_tokens, layers=layers)


def _read_layer(entry: Mapping[str, object], tensors: Mapping[str, Tensor]) -> LayerSnapshot:
    """Raises KeyError, TypeError or ValueError for anything that is not as declared."""
    layer, kind, fields = entry["i"], entry["kind"], entry["arrays"]
    if not isinstance(layer, int) or not isinstance(kind, str) or not isinstance(fields, list):
        raise TypeError("a layer of the record is malformed")
    names: list[str] = []
    arrays: list[Tensor] = []
    for name, shape in fields:
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"L{layer}.{name} has no shape")
        if prod(shape) == 0:
            arrays.append(torch.zeros(shape, dtype=torch.float32))
        else:
            stored = tensors[f"L{layer}.{name}"]
            if list(stored.shape) != shape or stored.dtype != torch.float32:
                raise ValueError(f"L{layer}.{name} is not what the record declares")
            arrays.append(stored.to("cpu", copy=True))
        names.append(name)
    return LayerSnapshot(layer=layer, kind=kind, names=tuple(names), arrays=tuple(arrays))


class SnapshotStore:
    """The most recently used snapshots by digest, bounded in number and, if given, in bytes.

    Snapshots go in and out by reference: they are copied when taken from a slot and when put
    back into one, so nothing here ever changes under its owner.
    """

    def __init__(self, max_entries: int, max_bytes: int | None = None) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._entries: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._used_at: dict[bytes, float] = {}
        self.clock: Callable[[], float] = time.monotonic

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def get(self, digest: bytes) -> Snapshot | None:
        """Look without counting and without making it recent."""
        return self._entries.get(digest)

    def put(self, digest: bytes, snapshot: Snapshot) -> bool:
        """Keep a snapshot as the most recent; an equal key keeps what it has, since equal
        tokens made it. False when it alone is over the bound."""
        if digest in self._entries:
            self._touch(digest)
            return True
        size = snapshot.nbytes
        if self.max_entries < 1 or (self.max_bytes is not None and size > self.max_bytes):
            return False
        self._entries[digest] = snapshot
        self._touch(digest)
        self.nbytes += size
        while len(self._entries) > self.max_entries or (
            self.max_bytes is not None and self.nbytes > self.max_bytes
        ):
            self._drop(next(iter(self._entries)))
            self.evictions += 1
        return True

    def find(self, digests: Sequence[bytes]) -> tuple[int, Snapshot] | None:
        """The last of a chain's digests that has a snapshot, as (index, snapshot). Nothing is
        counted: a candidate may still be refused."""
        for index in range(len(digests) - 1, -1, -1):
            snapshot = self._entries.get(digests[index])
            if snapshot is not None:
                return index, snapshot
        return None

    def newest(self, digests: Sequence[bytes]) -> tuple[int, Snapshot] | None:
        """`find`, counted as a hit or a miss. A hit makes all of the chain's snapshots up to
        there recent, roots most: many chains share them."""
        found = self.find(digests)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        for digest in reversed(digests[: found[0] + 1]):
            if digest in self._entries:
                self._touch(digest)
        return found

    @property
    def oldest_use(self) -> float | None:
        """When the snapshot was used that nobody has used for longest."""
        return next((self._used_at[digest] for digest in self._entries), None)

    def drop_older(self, limit: float) -> None:
        """Forget those whose last use was by then."""
        while (oldest := self.oldest_use) is not None and oldest <= limit:
            self._drop(next(iter(self._entries)))
            self.evictions += 1

    def discard(self, digest: bytes) -> None:
        """Forget one snapshot, if it is there."""
        if digest in self._entries:
            self._drop(digest)

    def clear(self) -> None:
        self._entries.clear()
        self._used_at.clear()
        self.nbytes = 0

    def check(self) -> None:
        """Raise AssertionError when a bound is passed or bytes are miscounted."""
        assert len(self._entries) <= self.max_entries, "more snapshots than allowed"
        assert self.nbytes == sum(s.nbytes for s in self._entries.values()), "bytes miscounted"

    def _touch(self, digest: bytes) -> None:
        self._entries.move_to_end(digest)
        self._used_at[digest] = self.clock()

    def _drop(self, digest: bytes) -> None:
        del self._used_at[digest]
        self.nbytes -= self._entries.pop(digest).nbytes


def snapshot_boundaries(
    num_prompt: int,
    *,
    block_tokens: int,
    interval_tokens: int,
    stable_tokens: int = 0,
    most: int = 16,
) -> tuple[int, ...]:
    """Where a prompt's prefill stops to take snapshots: token counts, ascending, each a
    multiple of the block and less than `num_prompt`, since the last token is never prefilled.

    They are the end of the stable part, the end of the prompt, one block before that (chat
    templates rewrite the end of the prompt in the next turn), and every R tokens. R starts at
    the interval, rounded up to blocks, and doubles until no more than `most` of them remain,
    so that the boundaries of a longer prompt are among those of a shorter one.
    """
    end = (num_prompt - 1) // block_tokens * block_tokens
    stable = stable_tokens // block_tokens * block_tokens
    every = -(-interval_tokens // block_tokens) * block_tokens
    while end // every > most:
        every *= 2
    chosen = {stable, end - block_tokens, end, *range(every, end, every)}
    return tuple(sorted(b for b in chosen if 0 < b <= end))
