"""Claims: snapshots are taken once, where they can be kept, and only what fits goes back into
a slot; more slots may be had while some are held."""

from __future__ import annotations

import torch

from osaurus.cache.state_tier import StateTier
from osaurus.topology.base import AttentionTopology, state_layers
from osaurus.topology.recurrent import gated_delta, short_conv

LAYERS = state_layers([short_conv(6, 3), gated_delta(8, 4, 2, 3, 5)])
SLOT_BYTES = 4 * (6 * 2 + 8 * 3 + 2 * 3 * 5)


def _tier(entries: int = 4, snapshots: int = 4, **changes: int) -> StateTier:
    settings = {"num_slots": 2, "max_tokens": 100, "block_tokens": 8, "interval_tokens": 32}
    return StateTier(
        LAYERS, max_entries=entries, max_bytes=snapshots * SLOT_BYTES, **{**settings, **changes}
    )


def _fill(tier: StateTier, slot: int, value: float) -> None:
    for layer in LAYERS:
        for array in tier.slots.layer_view(layer.layer):
            array[slot] = value


def test_boundaries_are_where_a_snapshot_can_be_kept() -> None:
    assert _tier().boundaries(90, 20) == (16, 32, 64, 80, 88)
    assert _tier(entries=0).boundaries(90, 20) == ()
    assert _tier(snapshots=0).boundaries(90, 20) == ()
    assert _tier(interval_tokens=0).boundaries(17, 0) == (8, 16)
    attention = state_layers([AttentionTopology(num_kv_heads=1, k_dim=4, v_dim=4)])
    plain = StateTier(
        attention,
        num_slots=1,
        max_tokens=100,
        block_tokens=8,
        interval_tokens=32,
        max_entries=4,
        max_bytes=0,
    )
    assert not plain.is_used
    assert plain.boundaries(90, 20) == ()
    assert plain.reserved_bytes == 0


def test_a_snapshot_is_taken_once_and_goes_back_where_it_belongs() -> None:
    tier = _tier()
    slot = tier.slots.allocate()
    _fill(tier, slot, 1.0)
    assert tier.capture(b"a", slot, 16)
    _fill(tier, slot, 2.0)
    assert not tier.capture(b"a", slot, 16)
    assert tier.restore(b"a", slot, 16)
    assert float(tier.slots.layer_view(0)[0][slot].max()) == 1.0
    assert not tier.restore(b"b", slot, 16)
    tier.check()


def test_what_does_not_belong_is_forgotten() -> None:
    tier = _tier()
    slot = tier.slots.allocate()
    assert tier.capture(b"a", slot, 16)
    _fill(tier, slot, 3.0)
    assert not tier.restore(b"a", slot, 24)
    assert b"a" not in tier.snapshots
    assert float(tier.slots.layer_view(0)[0][slot].min()) == 3.0
    _fill(tier, slot, float("inf"))
    assert not tier.capture(b"c", slot, 24)
    assert len(tier.snapshots) == 0


def test_the_budget_counts_slots_and_the_most_that_snapshots_take() -> None:
    assert _tier().reserved_bytes == (2 + 4) * SLOT_BYTES


def test_slots_are_added_while_others_are_held() -> None:
    slots = _tier().slots
    held = [slots.allocate(), slots.allocate()]
    for value, slot in enumerate(held):
        for layer in LAYERS:
            for array in slots.layer_view(layer.layer):
                array[slot] = value + 1.0
    slots.grow(1)
    assert (slots.num_slots, slots.num_free) == (2, 0)
    slots.grow(4)
    assert (slots.num_slots, slots.num_free, slots.num_held) == (4, 2, 2)
    assert slots.nbytes == 4 * SLOT_BYTES
    for value, slot in enumerate(held):
        for layer in LAYERS:
            for array in slots.layer_view(layer.layer):
                assert torch.equal(array[slot], torch.full_like(array[slot], value + 1.0))
    assert sorted([slots.allocate(), slots.allocate()]) == [2, 3]
    slots.check()
