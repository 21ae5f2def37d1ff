"""Claim: a product's bits do not depend on how many run beside it, a lone one included."""

from __future__ import annotations

import pytest
import torch

from osaurus.kernels.products import batched_product

SHAPES = [(9, 64, 128), (6, 96, 16), (6, 16, 32), (3, 64, 32), (4, 256, 32), (1, 64, 64)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_product_has_the_same_bits_alone_and_among_others(
    m: int, k: int, n: int, threads: int
) -> None:
    a, b = torch.randn(20, m, k), torch.randn(20, k, n)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for right in (b, b[:1].expand(20, -1, -1), torch.randn(20, n, k).transpose(1, 2)):
            whole = batched_product(a, right)
            torch.testing.assert_close(whole, torch.bmm(a, right))
            for count in (1, 2, 3, 7):
                part = batched_product(a[5 : 5 + count], right[5 : 5 + count])
                assert torch.equal(part, whole[5 : 5 + count]), count
                out = torch.empty(count, m, n)
                batched_product(a[5 : 5 + count], right[5 : 5 + count], out=out)
                assert torch.equal(out, whole[5 : 5 + count]), count
    finally:
        torch.set_num_threads(before)
