"""Claim: the index names only blocks that hold what it says, and drops what is of no use."""

from __future__ import annotations

import torch

from osaurus.cache.blocks import BlockPool
from osaurus.cache.prefix import PrefixIndex
from osaurus.topology.base import AttentionTopology, group_layers

FULL = AttentionTopology(num_kv_heads=2, k_dim=8, v_dim=8)
WINDOW = AttentionTopology(num_kv_heads=2, k_dim=8, v_dim=8, window=6)


def _pool(blocks: int = 6, layers: tuple[AttentionTopology, ...] = (FULL, WINDOW)) -> BlockPool:
    groups = group_layers(layers)
    size = sum(group.block_bytes(4, torch.float32) for group in groups)
    return BlockPool(groups, block_tokens=4, budget_bytes=blocks * size, dtype=torch.float32)


def _entry(pool: BlockPool, index: PrefixIndex, key: bytes, *, proven: bool = True) -> list[int]:
    blocks = [pool.allocate(group) for group in range(len(pool.groups))]
    index.put(key, blocks, maker=1, proven=proven)
    for group, block in enumerate(blocks):
        pool.release(group, block)
    return blocks


def _check(pool: BlockPool, index: PrefixIndex) -> None:
    pool.check()
    index.check()


def test_a_released_block_stays_findable_and_comes_back() -> None:
    pool = _pool()
    index = PrefixIndex(pool)
    blocks = _entry(pool, index, b"a")
    entry = index.get(b"a")
    assert entry is not None
    assert entry.blocks == blocks
    assert pool.used_bytes == 0
    assert pool.cached_bytes == sum(pool.block_bytes)
    pool.share(0, blocks[0])
    assert pool.used_bytes == pool.block_bytes[0]
    _check(pool, index)


def test_what_was_released_longest_ago_makes_room() -> None:
    pool = _pool(blocks=3)
    index = PrefixIndex(pool)
    for name in (b"old", b"middle", b"new"):
        _entry(pool, index, name)
    assert pool.can_allocate([1, 1])
    pool.allocate(0)
    pool.allocate(1)
    assert index.get(b"old") is None
    assert index.get(b"middle") is not None
    assert pool.evictions >= 1
    _check(pool, index)


def test_full_attention_without_its_block_takes_the_rest_of_the_entry_along() -> None:
    pool = _pool()
    index = PrefixIndex(pool)
    blocks = _entry(pool, index, b"a")
    index._evicted(0, blocks[0])
    assert index.get(b"a") is None
    assert pool.cached_bytes == 0
    _check(pool, index)


def test_a_window_block_may_go_alone() -> None:
    pool = _pool()
    index = PrefixIndex(pool)
    blocks = _entry(pool, index, b"a")
    index._evicted(1, blocks[1])
    entry = index.get(b"a")
    assert entry is not None
    assert entry.blocks == [blocks[0], None]
    _check(pool, index)


def test_an_equal_block_is_not_kept_twice() -> None:
    pool = _pool()
    index = PrefixIndex(pool)
    first = _entry(pool, index, b"a")
    second = [pool.allocate(0), pool.allocate(1)]
    assert index.put(b"a", second, maker=2) == first
    for group, block in enumerate(second):
        pool.release(group, block)
    assert pool.cached_blocks == 2
    _check(pool, index)


def test_unproven_values_are_zeroed_when_they_go() -> None:
    pool = _pool()
    index = PrefixIndex(pool)
    blocks = [pool.allocate(0), pool.allocate(1)]
    for group, block in enumerate(blocks):
        pool.storage[group][:, block] = float("nan")
    index.put(b"a", blocks, maker=1)
    pool.release(0, blocks[0])
    index.forget([b"a"], unproven_only=True)
    assert index.get(b"a") is None
    assert bool(torch.isnan(pool.storage[1][:, blocks[1]]).all()), "somebody holds it still"
    pool.release(1, blocks[1])
    assert all(bool(torch.isfinite(storage).all()) for storage in pool.storage)
    _check(pool, index)


def test_proven_entries_survive_a_failure_of_a_later_request() -> None:
    pool = _pool()
    index = PrefixIndex(pool)
    _entry(pool, index, b"a", proven=False)
    index.prove([b"a"])
    index.forget([b"a"], unproven_only=True)
    assert index.get(b"a") is not None
    index.clear()
    assert pool.cached_blocks == 0
    _check(pool, index)


def test_the_share_of_unused_prefixes_is_bounded() -> None:
    pool = _pool()
    pool.cached_limit_bytes = 2 * sum(pool.block_bytes)
    index = PrefixIndex(pool)
    for name in (b"a", b"b", b"c", b"d"):
        _entry(pool, index, name)
    assert pool.cached_bytes <= pool.cached_limit_bytes
    assert index.get(b"d") is not None
    _check(pool, index)


def test_nothing_is_kept_of_tokens_without_blocks() -> None:
    pool = _pool()
    index = PrefixIndex(pool)
    assert index.put(b"a", [None, None], maker=1) == [None, None]
    assert len(index) == 0
    without_groups = BlockPool([], block_tokens=4, budget_bytes=0, dtype=torch.float32)
    assert (without_groups.total_blocks, without_groups.free_blocks) == (0, 0)
    assert without_groups.can_allocate([])
    assert PrefixIndex(without_groups).put(b"a", [], maker=1) == []
    without_groups.check()
