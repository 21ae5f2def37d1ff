"""Records for tests of the disk tier: small, and equal when made from equal arguments."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from osaurus.cache.records import Record

NAMESPACE = "5eed" * 16


def digest(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def key_of(name: object) -> str:
    return digest(("record", name)).hex()[:32]


def make_run(
    name: object, count: int = 2, *, first: int = 0, size: int = 64, **changes: Any
) -> Record:
    """A run of `count` blocks (name, first), (name, first + 1) ...; its parent is the
    block before. Holds `size` bfloat16 a block."""
    generator = torch.Generator().manual_seed(int.from_bytes(digest((name, first))[:4]))
    fields: dict[str, Any] = {
        "key": key_of((name, first, count)),
        "namespace": NAMESPACE,
        "model": "org/tiny",
        "kind": "run",
        "first_token": first * 32,
        "end_token": (first + count) * 32,
        "blocks": tuple(digest((name, first + n)) for n in range(count)),
        "tensors": {
            "group0": torch.randn(count, size, generator=generator).to(torch.bfloat16),
        },
        "meta": {"kinds": "kv"},
        "parent": digest((name, first - 1)) if first else b"",
    }
    return Record(**(fields | changes))


def make_snapshot(name: object, end: int, **changes: Any) -> Record:
    """A snapshot after `end` blocks of the prefix `name`."""
    fields: dict[str, Any] = {
        "key": key_of(("snapshot", name, end)),
        "kind": "snapshot",
        "first_token": end * 32,
        "end_token": end * 32,
        "blocks": (digest((name, end - 1)),),
        "tensors": {"L0.state": torch.full((4, 4), float(end))},
        "parent": digest((name, end - 1)),
    }
    return make_run(name, **(fields | changes))


def same(one: Record | None, other: Record) -> bool:
    """Bit for bit, tensors too."""
    if one is None:
        return False
    fields = ("key", "namespace", "model", "kind", "first_token", "end_token", "blocks", "parent")
    if any(getattr(one, name) != getattr(other, name) for name in fields):
        return False
    if dict(one.meta) != dict(other.meta) or one.tensors.keys() != other.tensors.keys():
        return False
    return all(
        one.tensors[name].dtype == tensor.dtype
        and one.tensors[name].shape == tensor.shape
        and bits(one.tensors[name]) == bits(tensor)
        for name, tensor in other.tensors.items()
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class FakeClock:
    """Seconds since the epoch that only a test moves."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
