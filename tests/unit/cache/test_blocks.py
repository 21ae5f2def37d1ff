"""Claim: the pool never loses, doubles or leaks a block, and shares by reference count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.errors import InsufficientResources
from osaurus.topology.base import AttentionTopology, group_layers

FULL = AttentionTopology(num_kv_heads=2, k_dim=8, v_dim=8)
WINDOW = AttentionTopology(num_kv_heads=2, k_dim=8, v_dim=8, window=6)


def _pool(blocks: int = 12, layers: tuple = (FULL, WINDOW, FULL)) -> BlockPool:
    groups = group_layers(layers)
    size = sum(group.block_bytes(4, torch.float32) for group in groups)
    return BlockPool(groups, block_tokens=4, budget_bytes=blocks * size, dtype=torch.float32)


def test_layers_map_to_their_groups_storage() -> None:
    pool = _pool()
    assert [pool.layer_view(layer)[0] for layer in range(3)] == [0, 1, 0]
    assert pool.layer_view(2)[1].shape[1:] == (2, 4, 16)
    pool.layer_view(2)[1][3] = 1.0
    assert float(pool.storage[0][1, 3].sum()) == 2 * 4 * 16


def test_groups_share_one_budget() -> None:
    pool = _pool(blocks=4)
    assert pool.can_allocate([4, 4])
    assert not pool.can_allocate([5, 4])
    for _ in range(6):
        pool.allocate(0)
    assert pool.free_bytes == 0
    with pytest.raises(InsufficientResources):
        pool.allocate(1)
    pool.check()


def test_a_fork_shares_full_blocks_and_copies_the_open_one() -> None:
    pool = _pool()
    table = BlockTable(0)
    table.grow(10, pool)
    pool.storage[0][:, table.blocks[2]] = 5.0
    copy = table.fork(10, pool)
    assert copy.blocks[:2] == table.blocks[:2]
    assert copy.blocks[2] != table.blocks[2]
    assert torch.equal(pool.storage[0][:, copy.blocks[2]], pool.storage[0][:, table.blocks[2]])
    table.release(pool)
    pool.check()
    assert pool.used_bytes == 3 * pool.block_bytes[0]
    copy.release(pool)
    assert pool.used_bytes == 0


def test_blocks_behind_the_window_are_given_back() -> None:
    pool = _pool()
    table = BlockTable(1)
    table.grow(17, pool)
    table.drop_before(WINDOW.first_needed_token(17), pool)
    # The row at position 17 reads 12..17: block 3 (12..15) is the oldest one needed.
    assert (table.first_block, len(table.blocks)) == (3, 2)
    assert table.end_token(4) == 20
    table.release(pool)
    pool.check()


def test_a_block_freed_twice_is_refused() -> None:
    pool = _pool()
    block = pool.allocate(0)
    pool.release(0, block)
    with pytest.raises(ValueError, match="free already"):
        pool.release(0, block)
    with pytest.raises(ValueError, match="is free"):
        pool.share(0, block)


def test_a_budget_below_one_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(InsufficientResources, match="kv_budget_bytes"):
        BlockPool(group_layers([FULL]), block_tokens=4, budget_bytes=10, dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grow", "fork", "release", "slide"]),
            st.integers(0, 7),
            st.integers(1, 40),
        ),
        max_size=60,
    )
)
def test_any_history_of_tables_keeps_the_books(history: list[tuple[str, int, int]]) -> None:
    pool = _pool(blocks=16)
    tables: list[tuple[BlockTable, int]] = []
    for action, which, amount in history:
        group = which % 2
        if action == "grow":
            if pool.can_allocate([-(-amount // 4) * (group == g) for g in range(2)]):
                table = BlockTable(group)
                table.grow(amount, pool)
                tables.append((table, amount))
        elif tables:
            index = which % len(tables)
            table, length = tables[index]
            if action == "fork" and pool.can_allocate([1, 1]):
                if table.first_block * 4 <= min(amount, length):
                    tables.append((table.fork(min(amount, length), pool), min(amount, length)))
            elif action == "slide":
                table.drop_before(min(amount, length), pool)
            elif action == "release":
                tables.pop(index)[0].release(pool)
        pool.check()
    for table, _ in tables:
        table.release(pool)
    pool.check()
    assert pool.used_bytes == 0
