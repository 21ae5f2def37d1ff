"""Claim: the packed 4-bit product equals its reference, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from osaurus.kernels import quant_matmul

pytestmark = pytest.mark.skipif(
    quant_matmul.packed_layout() is None, reason="no packed layout on this processor"
)
SHAPES = [(64, 32), (192, 64), (576, 1536), (960, 576)]


def _random(n: int, k: int, group: int, seed: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=g)
    scale_zero = (torch.randn(k // group, n, 2, generator=g) * 0.1).bfloat16()
    return codes, scale_zero


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_and_gather_return_the_packed_codes(n: int, k: int) -> None:
    codes, _ = _random(n, k, 32, seed=n)
    packed = quant_matmul.pack(codes)
    assert packed.numel() == n * k // 2
    assert torch.equal(quant_matmul.unpack(packed, n, k), codes)
    rows = torch.tensor([0, n - 1, n // 2, 33, 31, 0])
    assert torch.equal(quant_matmul.gather_rows(packed, rows, n, k), codes[rows])


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("m", [1, 3, 16])
def test_product_equals_the_reference(group: int, m: int) -> None:
    n, k = 192, 384
    codes, scale_zero = _random(n, k, group, seed=m)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
    packed = quant_matmul.pack(codes)
    got = quant_matmul.matmul(x, packed, group, scale_zero)
    wanted = quant_matmul.matmul_reference(x, packed, group, scale_zero)
    assert (got.float() - wanted.float()).norm() / wanted.float().norm() < 4e-3


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_number_of_rows(n: int, k: int, threads: int) -> None:
    codes, scale_zero = _random(n, k, 32, seed=1)
    packed = quant_matmul.pack(codes)
    x = torch.randn(40, k, generator=torch.Generator().manual_seed(2)).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = quant_matmul.matmul(x, packed, 32, scale_zero)
        for m in (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 33):
            for start in (0, 40 - m):
                alone = quant_matmul.matmul(x[start : start + m], packed, 32, scale_zero)
                assert torch.equal(alone, together[start : start + m]), (m, start)
    finally:
        torch.set_num_threads(before)


def test_dequantized_columns_round_the_exact_weight_once() -> None:
    n, k = 128, 96
    codes, _ = _random(n, k, 32, seed=3)
    scale = torch.rand(k // 32, n).half()
    bias = torch.randn(k // 32, n).half()
    exact = codes.double().view(n, k // 32, 32) * scale.t().double().unsqueeze(-1)
    exact = (exact + bias.t().double().unsqueeze(-1)).view(n, k).t()
    packed = quant_matmul.pack(codes)
    for dtype in (torch.float32, torch.bfloat16):
        got = quant_matmul.dequantize_columns(packed, scale, bias, dtype)
        assert got.shape == (k, n)
        torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
