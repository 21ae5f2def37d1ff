"""Claims: the store keeps the most recently used snapshots within its bounds, roots longest,
and finds the newest of a chain; boundaries lie on blocks and nest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from osaurus.cache.snapshots import (
    LayerSnapshot,
    Snapshot,
    SnapshotStore,
    snapshot_boundaries,
)


def _snapshot(num_tokens: int, numbers: int = 10) -> Snapshot:
    layer = LayerSnapshot(layer=0, kind="ssm", names=("s",), arrays=(torch.zeros(numbers),))
    return Snapshot(num_tokens=num_tokens, layers=(layer,))


def _chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(length)]


def test_the_newest_of_a_chain_is_found() -> None:
    store, chain = SnapshotStore(10), _chain("a", 8)
    for index in (1, 4):
        assert store.put(chain[index], _snapshot(index))
    for length, wanted in ((8, 4), (5, 4), (4, 1), (2, 1)):
        found = store.newest(chain[:length])
        assert found is not None
        assert (found[0], found[1].num_tokens) == (wanted, wanted)
    assert store.newest(chain[:1]) is None
    assert store.newest(_chain("b", 8)) is None
    assert (store.hits, store.misses) == (4, 2)


def test_looking_counts_nothing_and_makes_nothing_recent() -> None:
    store, chain = SnapshotStore(2), _chain("a", 3)
    store.put(chain[0], _snapshot(0))
    store.put(chain[1], _snapshot(1))
    found = store.find(chain[:1])
    assert found is not None
    assert store.get(chain[0]) is found[1]
    assert (store.hits, store.misses) == (0, 0)
    store.put(chain[2], _snapshot(2))
    assert chain[0] not in store


def test_the_least_recent_goes_first_and_roots_last() -> None:
    store = SnapshotStore(4)
    one, other = _chain("a", 3), _chain("b", 3)
    for digest in one:
        store.put(digest, _snapshot(1))
    store.newest(one)
    for digest in other[:2]:
        store.put(digest, _snapshot(1))
    assert [digest in store for digest in one] == [True, True, False]
    assert store.evictions == 1
    store.check()


def test_bytes_are_bounded_and_counted() -> None:
    store = SnapshotStore(10, max_bytes=100)
    assert not store.put(b"big", _snapshot(1, 26))
    for name in (b"a", b"b", b"c"):
        assert store.put(name, _snapshot(1, 10))
    assert (len(store), store.nbytes) == (2, 80)
    store.discard(b"c")
    store.discard(b"c")
    assert store.nbytes == 40
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)
    store.check()


def test_a_view_costs_what_it_keeps_alive() -> None:
    layer = LayerSnapshot(layer=0, kind="ssm", names=("s",), arrays=(torch.zeros(1000)[:1],))
    assert Snapshot(num_tokens=1, layers=(layer,)).nbytes == 4000


def test_an_equal_key_keeps_what_it_has() -> None:
    store = SnapshotStore(2)
    first = _snapshot(1)
    store.put(b"a", first)
    store.put(b"b", _snapshot(2))
    assert store.put(b"a", _snapshot(3))
    assert store.get(b"a") is first
    store.put(b"c", _snapshot(4))
    assert b"b" not in store


def test_no_entries_means_none() -> None:
    store = SnapshotStore(0)
    assert not store.put(b"a", _snapshot(1))
    assert store.newest([b"a"]) is None


@pytest.mark.parametrize(
    ("prompt", "stable", "wanted"),
    [
        (1, 0, ()),
        (16, 0, ()),
        (17, 0, (16,)),
        (40, 0, (16, 32)),
        (200, 120, (112, 176, 192)),
        (193, 0, (176, 192)),
        (192, 0, (160, 176)),
        (1100, 700, (512, 688, 1024, 1072, 1088)),
        (50, 900, (32, 48)),
    ],
)
def test_boundaries_by_example(prompt: int, stable: int, wanted: tuple[int, ...]) -> None:
    got = snapshot_boundaries(prompt, block_tokens=16, interval_tokens=512, stable_tokens=stable)
    assert got == wanted


@given(
    prompt=st.integers(1, 200_000),
    stable=st.integers(0, 200_000),
    block=st.sampled_from([16, 32]),
    interval=st.sampled_from([1, 100, 512, 2048]),
    most=st.integers(1, 40),
)
def test_boundaries_lie_on_blocks_before_the_last_token(
    prompt: int, stable: int, block: int, interval: int, most: int
) -> None:
    got = snapshot_boundaries(
        prompt, block_tokens=block, interval_tokens=interval, stable_tokens=stable, most=most
    )
    assert list(got) == sorted(set(got))
    assert all(b % block == 0 and 0 < b < prompt for b in got)
    assert len(got) <= most + 3


def test_a_longer_prompt_stops_where_a_shorter_one_did() -> None:
    def regular(prompt: int) -> set[int]:
        got = snapshot_boundaries(prompt, block_tokens=16, interval_tokens=512)
        return set(got[:-2])

    for long in (5_000, 20_000, 90_000):
        assert {b for b in regular(long) if b < 4_000} <= regular(4_100)
