"""The state pool: slots of float32 arrays for layers that fold every token into their state.

A request that computes holds one slot from its first chunk to its end. Nobody shares a slot;
what others may take up again are snapshots, deep copies made at block boundaries. Only the
engine's thread calls this.

    free --allocate (zeros)--> held --take--> Snapshot --restore--> another held slot
      ^                         |
      +-------- release --------+
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from osaurus.cache.snapshots import LayerSnapshot, Snapshot
from osaurus.errors import InsufficientResources
from osaurus.topology.base import StateLayer


class StatePool:
    """Storage per array: [slots, *shape] float32; a growing array has rows for `max_tokens`.

    All slots are reserved at once and `nbytes` counts them whole, growing rows included; on a
    CPU the system commits the pages of growing rows as they are first written. A model without
    state has a pool whose slots cost nothing.
    """

    def __init__(
        self,
        layers: Sequence[StateLayer],
        *,
        num_slots: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = tuple(layers)
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.slot_bytes = self.bytes_at(max_tokens)
        self._device = device
        self._storage = self._reserve(num_slots)
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: set[int] = set()

    def layer_view(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's arrays, [slots, *shape] each; () for a layer without state."""
        return self._storage.get(layer, ())

    def grow(self, num_slots: int) -> None:
        """Have at least `num_slots`; held ones keep their number and contents. Storage moves:
        ask `layer_view` anew. Raises MemoryError or RuntimeError, with nothing changed, when
        there is no memory for it."""
        if num_slots <= self.num_slots:
            return
        larger = self._reserve(num_slots)
        for layer, arrays in self._storage.items():
            for old, new in zip(arrays, larger[layer], strict=True):
                for slot in self._held:
                    new[slot].copy_(old[slot])
        self._storage = larger
        self._free = [*range(num_slots - 1, self.num_slots - 1, -1), *self._free]
        self.num_slots = num_slots

    def bytes_at(self, num_tokens: int) -> int:
        """Bytes that one slot holds after `num_tokens`, and so does its snapshot."""
        return sum(layer.nbytes(num_tokens) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes reserved, whoever holds them."""
        return self.num_slots * self.slot_bytes

    @property
    def used_bytes(self) -> int:
        return len(self._held) * self.slot_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def allocate(self) -> int:
        """A slot in its initial state; raises `InsufficientResources` when all are held."""
        if not self._free:
            raise InsufficientResources(f"all {self.num_slots} state slots are held")
        slot = self._free.pop()
        self._held.add(slot)
        self.reset(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; what it holds counts for nothing from here on."""
        self._check_held(slot)
        self._held.remove(slot)
        self._free.append(slot)

    def reset(self, slot: int) -> None:
        """Back to the state before the first token. Rows of growing arrays stay as they are:
        none of them is valid."""
        self._check_held(slot)
        for layer in self.layers:
            for array, storage in zip(layer.arrays, self._storage[layer.layer], strict=True):
                if array.tokens_per_row is None:
                    storage[slot].zero_()

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Make `target` stand where `source` stands, after `num_tokens`."""
        self._check_held(source)
        self._check_held(target)
        for storage, rows in self._valid(num_tokens):
            storage[target, :rows].copy_(storage[source, :rows])

    def take(self, slot: int, num_tokens: int) -> Snapshot | None:
        """A deep copy on the host of a slot that has absorbed exactly `num_tokens`.

        None when a value is not finite: nobody may resume from such a state.
        """
        self._check_held(slot)
        copies = [
            storage[slot, :rows].to("cpu", copy=True) for storage, rows in self._valid(num_tokens)
        ]
        if not all(bool(copy.isfinite().all()) for copy in copies):
            return None
        layers: list[LayerSnapshot] = []
        for layer in self.layers:
            arrays, copies = copies[: len(layer.arrays)], copies[len(layer.arrays) :]
            layers.append(
                LayerSnapshot(
                    layer=layer.layer,
                    kind=layer.kind,
                    names=tuple(array.name for array in layer.arrays),
                    arrays=tuple(arrays),
                )
            )
        return Snapshot(num_tokens=num_tokens, layers=tuple(layers))

    def accepts(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot has exactly this pool's layers, kinds, arrays, shapes and dtype:
        more or less of anything is a miss of the whole."""
        if snapshot.num_tokens > self.max_tokens or len(snapshot.layers) != len(self.layers):
            return False
        return all(
            part.layer == layer.layer
            and part.kind == layer.kind
            and part.names == tuple(array.name for array in layer.arrays)
            and len(part.arrays) == len(layer.arrays)
            and all(
                tuple(tensor.shape) == array.shape_at(snapshot.num_tokens)
                and tensor.dtype == torch.float32
                for array, tensor in zip(layer.arrays, part.arrays, strict=True)
            )
            for layer, part in zip(self.layers, snapshot.layers, strict=True)
        )

    def restore(self, slot: int, snapshot: Snapshot) -> bool:
        """Copy a snapshot into a held slot; the slot then stands after
        `snapshot.num_tokens` tokens. False, with the slot untouched, unless `accepts`."""
        self._check_held(slot)
        if not self.accepts(snapshot):
            return False
        tensors = [tensor for part in snapshot.layers for tensor in part.arrays]
        valid = self._valid(snapshot.num_tokens)
        for (storage, rows), tensor in zip(valid, tensors, strict=True):
            storage[slot, :rows].copy_(tensor)
        return True

    def check(self) -> None:
        """Raise AssertionError unless free + held = all, each slot counted once."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert self._held.isdisjoint(self._free), "a held slot is free"
        assert len(self._held) + len(self._free) == self.num_slots, "a slot was lost"

    def _reserve(self, num_slots: int) -> dict[int, tuple[Tensor, ...]]:
        return {
            layer.layer: tuple(
                _zeros((num_slots, *array.shape_at(self.max_tokens)), self._device)
                for array in layer.arrays
            )
            for layer in self.layers
        }

    def _valid(self, num_tokens: int) -> list[tuple[Tensor, int]]:
        """Every array's storage in order, and how far along its first axis it is valid."""
        return [
            (storage, array.shape_at(num_tokens)[0])
            for layer in self.layers
            for array, storage in zip(layer.arrays, self._storage[layer.layer], strict=True)
        ]

    def _check_held(self, slot: int) -> None:
        if slot not in self._held:
            raise ValueError(f"state slot {slot} is not held")


def _zeros(shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=torch.float32, device=device)
    # numpy's zeros are untouched pages that read as zero; torch's would be written now.
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))
