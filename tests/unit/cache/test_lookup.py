"""Claims: with state a prefix ends where there is a snapshot and every block needed up to
there, asked anew for each place; without state at any block."""

from __future__ import annotations

import pytest
import torch

from osaurus.cache.blocks import BlockPool
from osaurus.cache.lookup import PrefixLookup
from osaurus.cache.prefix import PrefixIndex
from osaurus.cache.sequence import CachedSequence
from osaurus.cache.snapshots import Snapshot
from osaurus.cache.state_tier import StateTier
from osaurus.topology.base import AttentionTopology, LayerTopology, group_layers, state_layers
from osaurus.topology.recurrent import short_conv

FULL = AttentionTopology(num_kv_heads=1, k_dim=4, v_dim=4)
WINDOW = AttentionTopology(num_kv_heads=1, k_dim=4, v_dim=4, window=8)
STATE = short_conv(2, 3)
SIZE = 4


class Known:
    """A prompt of 8 blocks, some of them and some snapshots in memory."""

    def __init__(self, *layers: LayerTopology) -> None:
        groups = group_layers(layers)
        size = sum(group.block_bytes(SIZE, torch.float32) for group in groups)
        self.pool = BlockPool(
            groups, block_tokens=SIZE, budget_bytes=40 * size, dtype=torch.float32
        )
        self.index = PrefixIndex(self.pool)
        self.states = StateTier(
            state_layers(layers),
            num_slots=1,
            max_tokens=64,
            block_tokens=SIZE,
            interval_tokens=SIZE,
            max_entries=9,
            max_bytes=1 << 20,
        )
        self.lookup = PrefixLookup(self.pool, self.index, self.states, reuse_generated=True)
        self.sequence = CachedSequence(
            namespace=b"n", serial=1, block_tokens=SIZE, prompt_tokens=33, exact_until=32
        )
        self.sequence.extend(list(range(33)))

    def blocks(self, index: int, *groups: int) -> None:
        given: list[int | None] = [None] * len(self.pool.groups)
        for group in groups:
            given[group] = self.pool.allocate(group)
        self.index.put(self.sequence.exact_key(index), given, maker=9)

    def snapshot(self, length: int, *, generated: bool = False) -> None:
        key_of = self.sequence.generated_key if generated else self.sequence.exact_key
        empty = Snapshot(num_tokens=length * SIZE, layers=())
        assert self.states.snapshots.put(key_of(length - 1), empty)

    def ends(self, first: int = 0, last: int = 8) -> list[int]:
        return list(self.lookup.ends(self.sequence, first, last))


def test_attention_ends_at_the_last_block() -> None:
    known = Known(FULL)
    for index in (0, 1, 2, 4):
        known.blocks(index, 0)
    assert known.ends() == [3]
    assert known.ends(last=2) == [2]


def test_state_ends_at_snapshots_that_have_their_blocks() -> None:
    known = Known(FULL, STATE)
    for index in range(6):
        known.blocks(index, 0)
    assert known.ends() == []
    for length in (2, 5, 7):
        known.snapshot(length)
    assert known.ends() == [5, 2]
    assert known.ends(last=4) == [2]


def test_a_windows_blocks_for_a_longer_prefix_do_not_serve_a_shorter_one() -> None:
    known = Known(FULL, WINDOW, STATE)
    for index in range(6):
        known.blocks(index, *((0, 1) if index >= 4 else (0,)))
    for length in (3, 5, 6):
        known.snapshot(length)
    assert known.ends() == [6]


def test_state_alone_needs_nothing_but_a_snapshot() -> None:
    known = Known(STATE)
    known.snapshot(3)
    known.snapshot(6, generated=True)
    assert known.ends() == [6, 3]
    assert known.lookup.snapshot_key(known.sequence, 5) == known.sequence.generated_key(5)
    assert known.lookup.is_exact(known.sequence, 2, 3), "no block says otherwise"


@pytest.mark.parametrize("generated", [False, True])
def test_an_answer_never_resumes_at_anothers_snapshot(generated: bool) -> None:
    known = Known(STATE)
    known.sequence.prompt_tokens = 17
    known.snapshot(4)
    known.snapshot(6, generated=generated)
    assert known.ends() == [4]
