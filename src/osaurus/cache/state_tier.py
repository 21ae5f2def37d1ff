"""What the cache keeps for layers with state: a slot for each request, snapshots to resume from.

Keys are those of blocks: a snapshot belongs to the end of the block whose key it has. A model
without state has a tier whose slots cost nothing and which never takes a snapshot. Only the
engine's thread calls this, but for the sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from osaurus.cache.snapshots import SnapshotStore, snapshot_boundaries
from osaurus.cache.states import StatePool
from osaurus.topology.base import StateLayer


class StateTier:
    """`max_entries` and `max_bytes` bound the snapshots in memory, one of which is taken about
    every `interval_tokens` of a prompt. The rest is `StatePool`'s."""

    def __init__(
        self,
        layers: Sequence[StateLayer],
        *,
        num_slots: int,
        max_tokens: int,
        block_tokens: int,
        interval_tokens: int,
        max_entries: int,
        max_bytes: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots = StatePool(layers, num_slots=num_slots, max_tokens=max_tokens, device=device)
        self.snapshots = SnapshotStore(max_entries, max_bytes)
        self._block_tokens = block_tokens
        self._interval_tokens = max(interval_tokens, block_tokens)

    @property
    def is_used(self) -> bool:
        """Whether the model resumes at snapshots, not at any block."""
        return bool(self.slots.layers)

    @property
    def reserved_bytes(self) -> int:
        """Of the KV budget: all slots, and the most that snapshots may take."""
        return self.slots.nbytes + (self.snapshots.max_bytes or 0)

    def boundaries(self, num_prompt: int, stable_tokens: int) -> tuple[int, ...]:
        """Where a prompt's prefill stops to take snapshots; none that the store would refuse."""
        if not self.is_used or self.snapshots.max_entries < 1:
            return ()
        return tuple(
            boundary
            for boundary in snapshot_boundaries(
                num_prompt,
                block_tokens=self._block_tokens,
                interval_tokens=self._interval_tokens,
                stable_tokens=stable_tokens,
            )
            if self.slots.bytes_at(boundary) <= (self.snapshots.max_bytes or 0)
        )

    def capture(self, key: bytes, slot: int, num_tokens: int) -> bool:
        """Keep what a slot holds after `num_tokens`; whether a new snapshot is there for it.
        Values that are not finite are never kept."""
        if key in self.snapshots:
            return False
        snapshot = self.slots.take(slot, num_tokens)
        return snapshot is not None and self.snapshots.put(key, snapshot)

    def restore(self, key: bytes, slot: int, num_tokens: int) -> bool:
        """Put a slot where it stands after `num_tokens`. A snapshot that does not fit is
        forgotten, the slot left as it was, and the answer False."""
        snapshot = self.snapshots.get(key)
        if snapshot is None:
            return False
        if snapshot.num_tokens == num_tokens and self.slots.restore(slot, snapshot):
            return True
        self.snapshots.discard(key)
        return False

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.snapshots.discard(key)

    def check(self) -> None:
        """Raise AssertionError when a slot or bytes are lost."""
        self.slots.check()
        self.snapshots.check()
