"""Claims: a model's layers say what it keeps, by geometry and not by name."""

from __future__ import annotations

import pytest
import torch

from osaurus.topology.base import AttentionTopology, StateArray, group_layers, state_layers
from osaurus.topology.cca import convolutional_attention
from osaurus.topology.composite import CompositeTopology, NoMemory
from osaurus.topology.mla import LatentTopology
from osaurus.topology.pool import PoolBranch, compressed_pool
from osaurus.topology.recurrent import StateTopology, short_conv, ssm
from osaurus.topology.summary import (
    can_forget,
    has_pool,
    is_hybrid,
    observed,
    resumes_at_snapshots,
    topology_tag,
)

FULL = AttentionTopology(num_kv_heads=2, k_dim=8, v_dim=8)
WINDOW = AttentionTopology(num_kv_heads=2, k_dim=8, v_dim=8, window=128)
LATENT = LatentTopology(num_kv_heads=1, k_dim=576, v_dim=0, latent_dim=512)
CONV = short_conv(96, 3)
POOL = compressed_pool(
    WINDOW,
    [
        PoolBranch(name="compressor", row_dim=512, tokens_per_row=4, overlaps=True),
        PoolBranch(name="indexer", row_dim=128, tokens_per_row=4, overlaps=True),
    ],
)
CCA = convolutional_attention(FULL, 1280, 3, 2048)


def test_composites_share_the_groups_of_plain_layers() -> None:
    groups = group_layers([WINDOW, POOL, CONV, FULL, CCA, NoMemory(), LATENT])
    assert [(group.topology, group.layers) for group in groups] == [
        (WINDOW, (0, 1)),
        (FULL, (3, 4)),
        (LATENT, (6,)),
    ]


def test_a_latent_is_its_own_group_though_its_numbers_are_equal() -> None:
    plain = AttentionTopology(num_kv_heads=1, k_dim=576, v_dim=0)
    assert len(group_layers([LATENT, plain])) == 2
    assert LATENT.block_bytes(16, torch.bfloat16) == 16 * 576 * 2


def test_state_layers_keep_their_index_and_arity() -> None:
    layers = state_layers([CONV, FULL, ssm(40, 4, 4, 8, 16), POOL, CCA])
    assert [(s.layer, len(s.arrays)) for s in layers] == [(0, 1), (2, 2), (3, 6), (4, 2)]
    assert [array.shape for array in layers[3].arrays] == [(1280, 2), (2048,)]


@pytest.mark.parametrize(
    ("layers", "snapshots", "hybrid", "pool", "forget"),
    [
        ([FULL, WINDOW], False, False, False, True),
        ([LATENT, NoMemory()], False, False, False, True),
        ([CONV, FULL], True, True, False, False),
        ([CONV], True, True, False, False),
        ([CCA], True, True, False, False),
        ([WINDOW, POOL], True, False, True, False),
        ([CompositeTopology(children=(FULL,))], False, False, False, True),
        ([CompositeTopology(children=(POOL, CONV))], True, True, True, False),
        (
            [CompositeTopology(children=(CompositeTopology(children=(CONV,)), FULL))],
            True,
            True,
            False,
            False,
        ),
    ],
)
def test_what_a_model_needs_is_read_off_its_leaves(
    layers: list, snapshots: bool, hybrid: bool, pool: bool, forget: bool
) -> None:
    assert resumes_at_snapshots(layers) is snapshots
    assert is_hybrid(layers) is hybrid
    assert has_pool(layers) is pool
    assert can_forget(layers) is forget


def test_kinds_are_counted_once_a_layer() -> None:
    assert observed([CONV, CONV, FULL, POOL, CCA, NoMemory(), LATENT]) == {
        "short_conv": 2,
        "full_attention": 1,
        "pool": 1,
        "cca": 1,
        "none": 1,
        "mla": 1,
    }


def test_the_tag_names_every_geometry() -> None:
    layers = [CONV, CONV, FULL, WINDOW]
    assert topology_tag(layers) == (
        "2*short_conv(conv[96x2]) full_attention(2x8+8) sliding_window(2x8+8,w128)"
    )
    other = [
        [CONV, FULL, CONV, WINDOW],
        [CONV, CONV, FULL, FULL],
        [short_conv(96, 4), CONV, FULL, WINDOW],
        [CONV, CONV, CompositeTopology(children=(FULL,)), WINDOW],
        [*layers, NoMemory()],
        layers[:-1],
    ]
    assert len({topology_tag(each) for each in [layers, *other]}) == 7


def test_one_layer_has_one_block_table() -> None:
    with pytest.raises(ValueError, match="at most one paged part"):
        CompositeTopology(children=(FULL, CompositeTopology(children=(WINDOW,))))


def test_names_within_a_layer_are_unique() -> None:
    with pytest.raises(ValueError, match="not unique"):
        CompositeTopology(children=(CONV, CONV))
    with pytest.raises(ValueError, match="its own name"):
        StateTopology(kind="x", arrays=(StateArray(name="a", shape=(1,)),) * 2)


def test_state_that_needs_nothing_is_refused() -> None:
    """An empty list once meant both 'needs none' and 'was not captured'."""
    with pytest.raises(ValueError, match="at least one array"):
        StateTopology(kind="x", arrays=())


def test_a_latent_lies_within_its_key() -> None:
    with pytest.raises(ValueError, match="within its key"):
        LatentTopology(num_kv_heads=1, k_dim=16, v_dim=0, latent_dim=17)


def test_a_window_holds_the_blocks_it_may_still_read() -> None:
    block = WINDOW.block_bytes(16, torch.float32)
    # The row at position 200 reads 73..200: blocks 4 to 12.
    assert WINDOW.nbytes(200, 16, torch.float32) == 9 * block
    assert FULL.nbytes(200, 16, torch.float32) == 13 * block
