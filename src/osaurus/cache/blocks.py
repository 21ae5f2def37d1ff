"""The block pool: storage for every KV group, and who holds each block.

A block is `block_tokens` slots of all layers of one group. Full blocks are immutable and
shared by reference count; the block being written has one holder. All groups share one
byte budget. Only the engine's thread calls this.

    free --allocate--> held(1) --share--> held(n) --release--> held(n-1) ... --> free
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from osaurus.errors import InsufficientResources
from osaurus.topology.base import KVGroup


class BlockPool:
    """Storage per group: [layers, blocks, kv heads, block_tokens, k_dim + v_dim].

    On a CPU each group reserves address space for the whole budget and the system commits
    pages as blocks are first written, so nothing ever moves. On a device the budget is
    split so that every group gets the same number of blocks.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        block_tokens: int,
        budget_bytes: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.groups = tuple(groups)
        self.block_tokens = block_tokens
        self.budget_bytes = budget_bytes
        self.block_bytes = tuple(g.block_bytes(block_tokens, dtype) for g in groups)
        on_cpu = torch.device(device).type == "cpu"
        share = sum(self.block_bytes)
        self._capacity = tuple(
            budget_bytes // (bytes_ if on_cpu else share) for bytes_ in self.block_bytes
        )
        if min(self._capacity) < 1:
            raise InsufficientResources(
                f"the KV budget of {budget_bytes} bytes does not hold one block of "
                f"{max(self.block_bytes)} bytes; raise kv_budget_bytes"
            )
        self.storage = tuple(
            _reserve(group, blocks, block_tokens, dtype, device)
            for group, blocks in zip(groups, self._capacity, strict=True)
        )
        # Last in, first out, low ids first: pages that were touched are touched again.
        self._free = [list(range(n - 1, -1, -1)) for n in self._capacity]
        self._holders = [np.zeros(n, dtype=np.int32) for n in self._capacity]
        self.used_bytes = 0

    def layer_view(self, layer: int) -> tuple[int, Tensor]:
        """Group index of a layer, and its [blocks, kv heads, block_tokens, k+v] storage."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, self.storage[index][group.layers.index(layer)]
        raise KeyError(layer)

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    @property
    def total_blocks(self) -> int:
        """Blocks of the widest group's kind that the whole budget could hold."""
        return min(self.budget_bytes // sum(self.block_bytes), min(self._capacity))

    @property
    def free_blocks(self) -> int:
        """Blocks every group could still get at the same time."""
        by_bytes = self.free_bytes // sum(self.block_bytes)
        return min(by_bytes, *(len(free) for free in self._free))

    def can_allocate(self, counts: Sequence[int]) -> bool:
        """Whether `counts[g]` blocks of each group g are to be had together."""
        wanted = sum(n * size for n, size in zip(counts, self.block_bytes, strict=True))
        fits = all(n <= len(free) for n, free in zip(counts, self._free, strict=True))
        return fits and wanted <= self.free_bytes

    def allocate(self, group: int) -> int:
        """Take one block of a group. The caller has asked `can_allocate`; raises
        `InsufficientResources` otherwise."""
        if not self._free[group] or self.block_bytes[group] > self.free_bytes:
            raise InsufficientResources(
                f"no free KV block in a pool of {self.budget_bytes} bytes; raise kv_budget_bytes"
            )
        block = self._free[group].pop()
        self._holders[group][block] = 1
        self.used_bytes += self.block_bytes[group]
        return block

    def share(self, group: int, block: int) -> int:
        """Count one more holder of a block that is held; return the block."""
        if self._holders[group][block] < 1:
            raise ValueError(f"block {block} of group {group} is free")
        self._holders[group][block] += 1
        return block

    def copy_block(self, group: int, source: int) -> int:
        """A new block with the same contents, for a holder that will write on."""
        block = self.allocate(group)
        self.storage[group][:, block].copy_(self.storage[group][:, source])
        return block

    def release(self, group: int, block: int) -> None:
        """Give up one hold; the last one frees the block."""
        holders = self._holders[group]
        if holders[block] < 1:
            raise ValueError(f"block {block} of group {group} is free already")
        holders[block] -= 1
        if holders[block] == 0:
            self._free[group].append(block)
            self.used_bytes -= self.block_bytes[group]

    def clear_block(self, group: int, block: int) -> None:
        """Zero a block whose contents may not be finite, unless others hold it: masked
        slots of a reused block are multiplied by zero, which must stay zero."""
        if self._holders[group][block] == 1:
            self.storage[group][:, block].zero_()

    def check(self) -> None:
        """Raise AssertionError unless free + held = all, each block counted once."""
        held_bytes = 0
        for group, free in enumerate(self._free):
            held = {int(b) for b in np.flatnonzero(self._holders[group])}
            assert len(set(free)) == len(free), f"group {group}: a block is free twice"
            assert held.isdisjoint(free), f"group {group}: a held block is free"
            assert len(held) + len(free) == self._capacity[group], f"group {group}: lost block"
            held_bytes += len(held) * self.block_bytes[group]
        assert held_bytes == self.used_bytes, "used_bytes does not match the holders"


def _reserve(
    group: KVGroup, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    topology = group.topology
    shape = (
        len(group.layers),
        blocks,
        topology.num_kv_heads,
        block_tokens,
        topology.k_dim + topology.v_dim,
    )
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are untouched pages that read as zero; torch's would be written now.
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)


class BlockTable:
    """One request's blocks in one group. Tokens before `first_block` have left the window.

    `blocks[i]` holds tokens (first_block + i) * block_tokens onward.
    """

    __slots__ = ("blocks", "first_block", "group")

    def __init__(self, group: int) -> None:
        self.group = group
        self.first_block = 0
        self.blocks: list[int] = []

    def end_token(self, block_tokens: int) -> int:
        """Tokens up to here have a slot."""
        return (self.first_block + len(self.blocks)) * block_tokens

    def missing(self, num_tokens: int, block_tokens: int) -> int:
        """Blocks to add so that tokens [0, num_tokens) have slots."""
        return max(0, -(-num_tokens // block_tokens) - self.first_block - len(self.blocks))

    def grow(self, num_tokens: int, pool: BlockPool) -> None:
        for _ in range(self.missing(num_tokens, pool.block_tokens)):
            self.blocks.append(pool.allocate(self.group))

    def drop_before(self, token: int, pool: BlockPool) -> None:
        """Release blocks that lie wholly before `token`, cleared: nothing that comes later
        reads them, so nothing shows whether their values were finite."""
        while self.blocks and (self.first_block + 1) * pool.block_tokens <= token:
            block = self.blocks.pop(0)
            pool.clear_block(self.group, block)
            pool.release(self.group, block)
            self.first_block += 1

    def fork(self, num_tokens: int, pool: BlockPool) -> BlockTable:
        """A table for another request with the same first `num_tokens` tokens: full blocks
        are shared, one that is partly filled is copied. Needs at most one free block."""
        copy = BlockTable(self.group)
        copy.first_block = self.first_block
        full = num_tokens // pool.block_tokens - self.first_block
        copy.blocks = [pool.share(self.group, block) for block in self.blocks[:full]]
        if num_tokens % pool.block_tokens and full < len(self.blocks):
            copy.blocks.append(pool.copy_block(self.group, self.blocks[full]))
        return copy

    def release(self, pool: BlockPool, *, clear: bool = False) -> None:
        for block in self.blocks:
            if clear:
                pool.clear_block(self.group, block)
            pool.release(self.group, block)
        self.blocks = []
        self.first_block = 0
