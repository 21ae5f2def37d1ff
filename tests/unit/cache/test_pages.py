"""Claims: what blocks give back goes to the system; pages that they share with others stay."""

from __future__ import annotations

import mmap

import pytest
import torch

from osaurus.cache.pages import PagedStorage, stretches

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_DONTNEED"), reason="this system cannot take single pages back"
)
#: Layers of 8 blocks, each two and a half pages long.
NUMBERS = mmap.PAGESIZE * 5 // 8


def filled() -> PagedStorage:
    storage = PagedStorage((2, 8, NUMBERS), torch.float32, "cpu")
    assert not storage.tensor.any()
    storage.tensor.fill_(1.0)
    return storage


def test_pages_that_were_given_back_read_as_zero_and_the_others_as_before() -> None:
    storage = filled()
    given = storage.give_back(2, 5)
    # Seven and a half pages lie between, of which seven are whole.
    assert given == 2 * 7 * mmap.PAGESIZE
    assert storage.tensor[:, :2].eq(1).all()
    assert storage.tensor[:, 5:].eq(1).all()
    assert int(storage.tensor[:, 2:5].eq(0).sum()) * 4 == given
    storage.tensor[:, 2:5] = 3.0
    assert storage.tensor[:, 2:5].eq(3).all()


def test_less_than_a_page_stays() -> None:
    storage = PagedStorage((1, 64, 16), torch.float32, "cpu")
    storage.tensor.fill_(1.0)
    assert storage.give_back(1, 3) == 0
    assert storage.tensor.eq(1).all()


def test_a_storage_without_numbers_is_one() -> None:
    assert PagedStorage((2, 0, 16), torch.float32, "cpu").give_back(0, 0) == 0


def test_ascending_ids_are_stretches() -> None:
    assert stretches([7, 3, 4]) == [(3, 5), (7, 8)]
    assert stretches([]) == []
