"""The block pool: storage for every KV group, and who holds each block.

A block is `block_tokens` slots of all layers of one group. Full blocks are immutable and
shared by reference count; the block being written has one holder. All groups share one
byte budget. Only the engine's thread calls this.

    free --allocate--> held(1) --share--> held(n) --release--> held(n-1) ... --> free
                          ^                                       |
                          +-- share -- cached (no holder) <-------+  if its owner keeps it

A kept block that nobody holds stays findable until its bytes are wanted: the one released
longest ago goes first. Holders release a sequence from its end, so leaves go before roots.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from osaurus.cache.coded import CodedBlocks, CodedGroup
from osaurus.cache.pages import PagedStorage, stretches
from osaurus.errors import InsufficientResources
from osaurus.kernels.coded_attention import CodedStorage
from osaurus.topology.base import KVGroup
from osaurus.topology.codecs.base import KVCodec


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
        codecs: Sequence[KVCodec | None] = (),
        exact_reasons: Sequence[str] = (),
    ) -> None:
        self.groups = tuple(groups)
        self.block_tokens = block_tokens
        self.budget_bytes = budget_bytes
        self.block_bytes = tuple(g.block_bytes(block_tokens, dtype) for g in groups)
        on_cpu = torch.device(device).type == "cpu"
        coded_bytes = [_coded_bytes(g, c) for g, c in zip(groups, codecs, strict=False)]
        share = sum(self.block_bytes) + sum(coded_bytes)
        self._capacity = tuple(
            budget_bytes // (bytes_ if on_cpu else share) for bytes_ in self.block_bytes
        )
        if self.groups and min(self._capacity) < 1:
            raise InsufficientResources(
                f"the KV budget of {budget_bytes} bytes does not hold one block of "
                f"{max(self.block_bytes)} bytes; raise kv_budget_bytes"
            )
        self._pages = tuple(
            PagedStorage(_shape(group, blocks, block_tokens), dtype, device)
            for group, blocks in zip(groups, self._capacity, strict=True)
        )
        self.storage = tuple(pages.tensor for pages in self._pages)
        self._touched = [0] * len(self._capacity)
        self.coded = CodedBlocks(
            [
                None
                if codec is None
                else CodedGroup(group, codec, budget_bytes // size if on_cpu else blocks, device)
                for group, codec, size, blocks in zip(
                    groups, codecs, coded_bytes, self._capacity, strict=False
                )
            ],
            exact_reasons,
        )
        # Last in, first out, low ids first: pages that were touched are touched again.
        self._free = [list(range(n - 1, -1, -1)) for n in self._capacity]
        self._holders = [np.zeros(n, dtype=np.int32) for n in self._capacity]
        self._kept: list[set[int]] = [set() for _ in self._capacity]
        #: Blocks that lose their last holder while they may hold values that are not finite.
        self._dirty: set[tuple[int, int]] = set()
        #: (group, block) without holder but kept, released longest ago first, and when.
        self._cached: OrderedDict[tuple[int, int], float] = OrderedDict()
        self.clock: Callable[[], float] = time.monotonic
        self._num_cached = [0] * len(self._capacity)
        self.used_bytes = 0  #: held by somebody
        self.cached_bytes = 0  #: kept for nobody in particular
        self.cached_limit_bytes = budget_bytes
        self.evictions = 0
        #: Told of a block that stops being findable for want of room.
        self.on_evict: Callable[[int, int], None] = lambda group, block: None

    def layer_view(self, layer: int) -> tuple[int, Tensor]:
        """Group index of a layer, and its [blocks, kv heads, block_tokens, k+v] storage."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, self.storage[index][group.layers.index(layer)]
        raise KeyError(layer)

    def coded_view(self, layer: int) -> CodedStorage | None:
        """A layer's coded blocks; None where its blocks stay exact."""
        for index, group in enumerate(self.groups):
            coded = self.coded[index]
            if layer in group.layers and coded is not None:
                return coded.layer(group.layers.index(layer))
        return None

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds, cached blocks included: those make room when asked."""
        return self.budget_bytes - self.used_bytes

    @property
    def total_blocks(self) -> int:
        """Blocks of the widest group's kind that the whole budget could hold; 0 for a model
        whose layers keep none."""
        if not self.groups:
            return 0
        return min(self.budget_bytes // sum(self.block_bytes), min(self._capacity))

    @property
    def free_blocks(self) -> int:
        """Blocks every group could still get at the same time."""
        if not self.groups:
            return 0
        by_bytes = self.free_bytes // sum(self.block_bytes)
        return min(by_bytes, *(self._available(group) for group in range(len(self.groups))))

    def _available(self, group: int) -> int:
        return len(self._free[group]) + self._num_cached[group]

    def can_allocate(self, counts: Sequence[int]) -> bool:
        """Whether `counts[g]` blocks of each group g are to be had together."""
        wanted = sum(n * size for n, size in zip(counts, self.block_bytes, strict=True))
        fits = all(n <= self._available(group) for group, n in enumerate(counts))
        return fits and wanted <= self.free_bytes

    def allocate(self, group: int) -> int:
        """Take one block of a group, at the cost of cached ones where needed. The caller has
        asked `can_allocate`; raises `InsufficientResources` otherwise."""
        size = self.block_bytes[group]
        if not self._available(group) or size > self.free_bytes:
            raise InsufficientResources(
                f"no free KV block in a pool of {self.budget_bytes} bytes; raise kv_budget_bytes"
            )
        if not self._free[group]:
            self._evict(next(entry for entry in self._cached if entry[0] == group))
        while self.used_bytes + self.cached_bytes + size > self.budget_bytes:
            self._evict(next(iter(self._cached)))
        block = self._free[group].pop()
        self._touched[group] = max(self._touched[group], block + 1)
        self._holders[group][block] = 1
        self.used_bytes += size
        return block

    def share(self, group: int, block: int) -> int:
        """Count one more holder of a block that is held or cached; return the block."""
        if self._holders[group][block] < 1:
            if (group, block) not in self._cached:
                raise ValueError(f"block {block} of group {group} is free")
            self._uncache(group, block)
            self.used_bytes += self.block_bytes[group]
        self._holders[group][block] += 1
        return block

    def is_kept(self, group: int, block: int) -> bool:
        return block in self._kept[group]

    def keep(self, group: int, block: int) -> None:
        """A held block is worth finding again: it becomes cached with its last release."""
        if self._holders[group][block] < 1:
            raise ValueError(f"block {block} of group {group} is free")
        self._kept[group].add(block)

    def forget(self, group: int, block: int, *, clear: bool = False) -> None:
        """Undo `keep`: a cached block becomes free now, a held one with its last release.
        `clear` zeroes it then, for contents that may not be finite."""
        self._kept[group].discard(block)
        if clear:
            self._dirty.add((group, block))
        if (group, block) in self._cached:
            self._uncache(group, block)
            self._free_block(group, block)

    def _uncache(self, group: int, block: int) -> None:
        del self._cached[group, block]
        self._num_cached[group] -= 1
        self.cached_bytes -= self.block_bytes[group]

    def _evict(self, entry: tuple[int, int]) -> None:
        """Make a cached block free; whoever kept it may forget others at the same time."""
        self.evictions += 1
        self.on_evict(*entry)
        if entry in self._cached:
            self.forget(*entry)

    def _free_block(self, group: int, block: int) -> None:
        if (group, block) in self._dirty:
            self._dirty.discard((group, block))
            self.storage[group][:, block].zero_()
        self._free[group].append(block)

    def copy_block(self, group: int, source: int) -> int:
        """A new block with the same contents, for a holder that will write on."""
        block = self.allocate(group)
        self.storage[group][:, block].copy_(self.storage[group][:, source])
        return block

    def can_code(self, group: int) -> bool:
        """Whether there is room for one more coded block of a group."""
        coded = self.coded[group]
        return coded is not None and coded.has_room and coded.block_bytes <= self.free_bytes

    def code(self, group: int, block: int) -> int | None:
        """Code a held block; returns the coded one's id, which takes its place in its table,
        or None when the block has to stay exact. The caller has asked `can_code`, and
        releases the exact one."""
        coded = self.coded[group]
        if coded is None:
            return None
        while self.used_bytes + self.cached_bytes + coded.block_bytes > self.budget_bytes:
            self._evict(next(iter(self._cached)))
        made = coded.encode(self.storage[group][:, block])
        if made is not None:
            self.used_bytes += coded.block_bytes
        return made

    def give_back_pages(self) -> None:
        """Return the memory of free blocks to the system, as far as it comes in whole pages."""
        for group, free in enumerate(self._free):
            touched = [block for block in free if block < self._touched[group]]
            for first, last in stretches(touched):
                self._pages[group].give_back(first, last)
            taken = set(range(self._touched[group])).difference(touched)
            self._touched[group] = max(taken, default=-1) + 1
        for coded in self.coded.groups:
            if coded is not None:
                coded.give_back_pages()

    def read_blocks(self, group: int, blocks: Sequence[int]) -> Tensor:
        """A copy on the host: [layers, n, kv heads, block_tokens, k + v]."""
        storage = self.storage[group]
        out = torch.empty((storage.shape[0], len(blocks), *storage.shape[2:]), dtype=storage.dtype)
        for place, block, count in _stretches(range(len(blocks)), blocks):
            out[:, place : place + count].copy_(storage[:, block : block + count])
        return out

    def write_blocks(
        self, group: int, blocks: Sequence[int], source: Tensor, places: Sequence[int]
    ) -> None:
        """Copy `source[:, places]` of `read_blocks`'s form into blocks that the caller alone
        holds."""
        storage = self.storage[group]
        for place, block, count in _stretches(places, blocks):
            storage[:, block : block + count].copy_(source[:, place : place + count])

    def release(self, group: int, block: int) -> None:
        """Give up one hold; the last one frees the block, or caches it if it is kept."""
        if block < 0:
            self._release_coded(group, block)
            return
        holders = self._holders[group]
        if holders[block] < 1:
            raise ValueError(f"block {block} of group {group} is free already")
        holders[block] -= 1
        if holders[block]:
            return
        self.used_bytes -= self.block_bytes[group]
        if block not in self._kept[group]:
            self._free_block(group, block)
            return
        self._cached[group, block] = self.clock()
        self._num_cached[group] += 1
        self.cached_bytes += self.block_bytes[group]
        while self.cached_bytes > self.cached_limit_bytes:
            self._evict(next(iter(self._cached)))

    @property
    def oldest_release(self) -> float | None:
        """When the cached block was released that nobody has used for longest."""
        return next(iter(self._cached.values()), None)

    def evict_older(self, limit: float) -> None:
        """Free cached blocks that were released by then."""
        while (oldest := self.oldest_release) is not None and oldest <= limit:
            self._evict(next(iter(self._cached)))

    def _release_coded(self, group: int, block: int) -> None:
        coded = self.coded[group]
        if coded is None:
            raise ValueError(f"group {group} has no coded blocks")
        coded.release(block)
        self.used_bytes -= coded.block_bytes

    def clear_block(self, group: int, block: int) -> None:
        """Zero a block whose contents may not be finite once nobody holds it, unless it is
        kept: masked slots of a reused block are multiplied by zero, which must stay zero."""
        if block >= 0 and block not in self._kept[group]:
            self._dirty.add((group, block))

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    def check(self) -> None:
        """Raise AssertionError unless free + held + cached = all, each block counted once."""
        held_bytes = cached_bytes = 0
        for group, free in enumerate(self._free):
            held = {int(b) for b in np.flatnonzero(self._holders[group])}
            cached = {block for g, block in self._cached if g == group}
            assert len(set(free)) == len(free), f"group {group}: a block is free twice"
            assert held.isdisjoint(free), f"group {group}: a held block is free"
            assert cached.isdisjoint(free), f"group {group}: a cached block is free"
            assert cached.isdisjoint(held), f"group {group}: a held block is cached"
            assert cached <= self._kept[group], f"group {group}: cached for nobody"
            assert self._kept[group] <= cached | held, f"group {group}: a free block is kept"
            assert len(cached) == self._num_cached[group], f"group {group}: miscounted"
            total = len(held) + len(free) + len(cached)
            assert total == self._capacity[group], f"group {group}: lost block"
            held_bytes += len(held) * self.block_bytes[group]
            cached_bytes += len(cached) * self.block_bytes[group]
        held_bytes += self.coded.used_bytes
        assert held_bytes == self.used_bytes, "used_bytes does not match the holders"
        assert cached_bytes == self.cached_bytes, "cached_bytes does not match"
        assert held_bytes + cached_bytes <= self.budget_bytes, "over the budget"


def _stretches(places: Sequence[int], blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place, block, count) of stretches that ascend by one in both: one copy each."""
    start = 0
    for end in range(1, len(blocks) + 1):
        count = end - start
        if (
            end == len(blocks)
            or blocks[end] != blocks[start] + count
            or places[end] != places[start] + count
        ):
            yield places[start], blocks[start], count
            start = end


def _shape(group: KVGroup, blocks: int, block_tokens: int) -> tuple[int, ...]:
    topology = group.topology
    width = topology.k_dim + topology.v_dim
    return (len(group.layers), blocks, topology.num_kv_heads, block_tokens, width)


def _coded_bytes(group: KVGroup, codec: KVCodec | None) -> int:
    if codec is None:
        return 0
    return len(group.layers) * group.topology.num_kv_heads * codec.block_bytes


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
        """Release blocks that lie wholly before `token`. Those that nobody keeps are cleared:
        nothing that comes later reads them, so nothing shows whether they were finite."""
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
        """Give every block up, the newest first. `clear` zeroes those that nobody keeps."""
        for block in reversed(self.blocks):
            if clear:
                pool.clear_block(self.group, block)
            pool.release(self.group, block)
        self.blocks = []
        self.first_block = 0

    def adopt(self, first_block: int, blocks: Sequence[int], pool: BlockPool) -> None:
        """Hold `blocks`, which lie from block index `first_block` on and are held or cached,
        in place of what the table held before `first_block`; both parts must touch or the
        old one falls away."""
        shared = [pool.share(self.group, block) for block in blocks]
        if first_block > self.first_block + len(self.blocks) or not self.blocks:
            self.release(pool)
            self.first_block = first_block
        self.blocks += shared
