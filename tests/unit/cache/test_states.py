"""Claims: slots are counted, start at zero and are never shared; a snapshot is a copy at both
ends, and only one that fits whole goes back in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from osaurus.cache.snapshots import Snapshot
from osaurus.cache.states import StatePool
from osaurus.errors import InsufficientResources
from osaurus.topology.base import AttentionTopology, StateArray, state_layers
from osaurus.topology.pool import PoolBranch, compressed_pool
from osaurus.topology.recurrent import StateTopology, gated_delta, short_conv

WINDOW = AttentionTopology(num_kv_heads=1, k_dim=4, v_dim=4, window=8)
LAYERS = state_layers(
    [
        short_conv(6, 3),
        AttentionTopology(num_kv_heads=1, k_dim=4, v_dim=4),
        gated_delta(8, 4, 2, 3, 5),
        compressed_pool(WINDOW, [PoolBranch(name="c", row_dim=3, tokens_per_row=4)]),
    ]
)
SLOT_NUMBERS = 6 * 2 + (8 * 3 + 2 * 3 * 5) + (25 * 3 + 4 * 3 + 4 * 3)


def _pool(slots: int = 3) -> StatePool:
    return StatePool(LAYERS, num_slots=slots, max_tokens=100)


def _fill(pool: StatePool, slot: int, value: float) -> None:
    for layer in pool.layers:
        for array in pool.layer_view(layer.layer):
            array[slot] = value


def _take(pool: StatePool, slot: int, num_tokens: int) -> Snapshot:
    taken = pool.take(slot, num_tokens)
    assert taken is not None
    return taken


def _values(snapshot: Snapshot) -> set[float]:
    return {float(v) for part in snapshot.layers for a in part.arrays for v in a.flatten()}


def test_bytes_are_counted_to_the_last_one() -> None:
    pool = _pool()
    assert pool.slot_bytes == 4 * SLOT_NUMBERS
    assert pool.nbytes == 3 * pool.slot_bytes
    slot = pool.allocate()
    assert pool.used_bytes == pool.slot_bytes
    # After 11 tokens the growing array has two rows of three.
    assert _take(pool, slot, 11).nbytes == 4 * (SLOT_NUMBERS - 23 * 3)
    pool.release(slot)
    assert (pool.used_bytes, pool.num_free) == (0, 3)


def test_layers_without_state_have_no_arrays() -> None:
    pool = _pool()
    assert pool.layer_view(1) == ()
    assert [len(pool.layer_view(layer)) for layer in (0, 2, 3)] == [1, 2, 3]


def test_a_pool_without_state_costs_nothing() -> None:
    pool = StatePool([], num_slots=2, max_tokens=10)
    slot = pool.allocate()
    assert (pool.nbytes, pool.slot_bytes) == (0, 0)
    pool.release(slot)
    pool.check()


def test_slots_run_out_and_come_back() -> None:
    pool = _pool(2)
    slots = [pool.allocate(), pool.allocate()]
    assert sorted(slots) == [0, 1]
    with pytest.raises(InsufficientResources, match="all 2 state slots"):
        pool.allocate()
    pool.release(slots[0])
    pool.check()
    with pytest.raises(ValueError, match="not held"):
        pool.release(slots[0])
    assert pool.allocate() == slots[0]


def test_a_slot_starts_at_zero_whatever_was_there() -> None:
    pool = _pool(1)
    slot = pool.allocate()
    _fill(pool, slot, float("nan"))
    pool.release(slot)
    assert _values(_take(pool, pool.allocate(), 0)) == {0.0}


def test_only_rows_that_hold_something_are_copied() -> None:
    pool = _pool()
    first, second = pool.allocate(), pool.allocate()
    _fill(pool, first, 5.0)
    pool.copy_slot(first, second, 7)
    rows = pool.layer_view(3)[0]
    assert (rows[second, :1] == 5.0).all()
    assert (rows[second, 1:] == 0.0).all()
    assert _values(_take(pool, second, 7)) == {5.0}


def test_a_snapshot_is_a_copy_at_both_ends() -> None:
    pool = _pool()
    slot, other = pool.allocate(), pool.allocate()
    _fill(pool, slot, 1.0)
    taken = _take(pool, slot, 20)
    _fill(pool, slot, 2.0)
    assert _values(taken) == {1.0}
    assert pool.restore(other, taken)
    _fill(pool, other, 3.0)
    assert _values(taken) == {1.0}


def test_a_state_that_is_not_finite_is_never_taken() -> None:
    pool = _pool()
    slot = pool.allocate()
    pool.layer_view(2)[1][slot, 0, 0, 0] = float("inf")
    assert pool.take(slot, 16) is None


def test_stale_rows_do_not_spoil_a_snapshot() -> None:
    pool = _pool()
    slot = pool.allocate()
    pool.layer_view(3)[0][slot, 4:] = float("nan")
    assert pool.take(slot, 19) is not None
    assert pool.take(slot, 20) is None


def test_what_does_not_fit_whole_restores_nothing() -> None:
    pool = _pool()
    slot = pool.allocate()
    _fill(pool, slot, 1.0)
    good = _take(pool, slot, 20)
    first = good.layers[0]
    bad = [
        replace(good, layers=()),
        replace(good, layers=good.layers[:-1]),
        replace(good, layers=good.layers[::-1]),
        replace(good, layers=(*good.layers, good.layers[0])),
        replace(good, num_tokens=24),
        replace(good, num_tokens=1000),
        replace(good, layers=(replace(first, kind="ssm"), *good.layers[1:])),
        replace(good, layers=(replace(first, names=("other",)), *good.layers[1:])),
        replace(good, layers=(replace(first, arrays=()), *good.layers[1:])),
        replace(
            good, layers=(replace(first, arrays=(first.arrays[0].double(),)), *good.layers[1:])
        ),
        replace(good, layers=(replace(first, arrays=(first.arrays[0].T,)), *good.layers[1:])),
    ]
    _fill(pool, slot, 9.0)
    for snapshot in bad:
        assert not pool.accepts(snapshot)
        assert not pool.restore(slot, snapshot)
    assert _values(_take(pool, slot, 20)) == {9.0}
    assert pool.restore(slot, good)


def test_the_number_of_arrays_is_the_layers_own() -> None:
    """A short convolution has one array, a gated delta network two; neither fills the other."""
    one = StatePool(state_layers([short_conv(6, 3)]), num_slots=1, max_tokens=10)
    two = StatePool(
        state_layers(
            [
                StateTopology(
                    kind="short_conv",
                    arrays=(
                        StateArray(name="conv", shape=(6, 2)),
                        StateArray(name="state", shape=(1, 1)),
                    ),
                )
            ]
        ),
        num_slots=1,
        max_tokens=10,
    )
    assert not two.restore(two.allocate(), _take(one, one.allocate(), 4))


def test_a_free_slot_is_nobodys() -> None:
    pool = _pool()
    slot = pool.allocate()
    taken = _take(pool, slot, 4)
    pool.release(slot)
    for use in (
        lambda: pool.take(slot, 4),
        lambda: pool.restore(slot, taken),
        lambda: pool.reset(slot),
        lambda: pool.copy_slot(slot, slot, 4),
    ):
        with pytest.raises(ValueError, match="not held"):
            use()


def test_storage_never_moves() -> None:
    pool = _pool()
    before = [a.data_ptr() for layer in pool.layers for a in pool.layer_view(layer.layer)]
    slot = pool.allocate()
    assert pool.restore(slot, _take(pool, slot, 40))
    after = [a.data_ptr() for layer in pool.layers for a in pool.layer_view(layer.layer)]
    assert before == after
    assert torch.is_tensor(pool.layer_view(0)[0])
