"""Claims about rotary tables, noise and dense rows."""

from __future__ import annotations

import math

import pytest
import torch

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.linear import linear_heads, linear_rows, matmul_many
from osaurus.kernels.norm import rms_norm, rms_norm_reference
from osaurus.kernels.rope import RotaryTable, apply_rope, inverse_frequencies
from osaurus.kernels.sample import gumbel_noise


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    table = RotaryTable(*inverse_frequencies(32, 10000.0, None, 64), "cpu")
    x, y = torch.randn(1, 2, 32), torch.randn(1, 2, 32)

    def rotated(v: torch.Tensor, position: int) -> torch.Tensor:
        return apply_rope(v, *table.at(torch.tensor([position]), position))

    torch.testing.assert_close(rotated(x, 5000).norm(), x.norm())
    near = (rotated(x, 10) * rotated(y, 3)).sum()
    far = (rotated(x, 107) * rotated(y, 100)).sum()
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)


def test_dims_past_the_rotary_ones_pass_through() -> None:
    table = RotaryTable(*inverse_frequencies(16, 10000.0, None, 64), "cpu")
    x = torch.randn(3, 2, 24)
    out = apply_rope(x, *table.at(torch.tensor([4, 9, 2]), 9))
    assert torch.equal(out[..., 16:], x[..., 16:])
    assert not torch.equal(out[..., :16], x[..., :16])


def test_an_unknown_rope_scaling_is_named() -> None:
    with pytest.raises(UnsupportedBundle, match="longrope"):
        inverse_frequencies(32, 10000.0, {"rope_type": "longrope"}, 64)


def test_noise_is_standard_gumbel_and_a_function_of_its_key() -> None:
    ids = torch.arange(200_000)
    noise = gumbel_noise(7, 3, ids)
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    cdf = torch.exp(-torch.exp(-noise.sort().values))
    steps = (torch.arange(len(ids)) + 0.5) / len(ids)
    assert float((cdf - steps).abs().max()) < 1.95 / len(ids) ** 0.5  # Kolmogorov-Smirnov, 0.1 %
    assert torch.equal(gumbel_noise(7, 3, ids[500:600]), noise[500:600])
    for other in (gumbel_noise(8, 3, ids), gumbel_noise(7, 4, ids), gumbel_noise(-7, 3, ids)):
        assert abs(float(torch.corrcoef(torch.stack([noise, other]))[0, 1])) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [96, 576, 4864])
def test_dense_rows_have_the_same_bits_in_any_number(dtype: torch.dtype, k: int) -> None:
    weight = torch.randn(130, k).to(dtype)
    x = torch.randn(19, k).to(dtype)
    together = linear_rows(x, weight)
    for m in (1, 2, 7, 8, 9, 16):
        assert torch.equal(linear_rows(x[:m], weight), together[:m]), m
        assert torch.equal(linear_rows(x[-m:], weight), together[-m:]), m


@pytest.mark.parametrize(("n", "k"), [(576, 1536), (960, 576), (1024, 4096)])
def test_prefill_products_have_the_same_bits_however_rows_are_cut(n: int, k: int) -> None:
    weight = torch.randn(k, n).bfloat16()
    x = torch.randn(300, k).bfloat16()
    whole = matmul_many(x, weight)
    for m in (1, 2, 7, 8, 9, 64, 299):
        parts = [matmul_many(part, weight) for part in x.split(m)]
        assert torch.equal(torch.cat(parts), whole), m


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "k", "n"), [(1, 32, 64), (5, 24, 40), (16, 128, 512)])
def test_products_a_head_have_the_same_bits_in_any_number(
    dtype: torch.dtype, heads: int, k: int, n: int
) -> None:
    weight, x = torch.randn(heads, k, n).to(dtype), torch.randn(60, heads, k).to(dtype)
    small, large = linear_heads(x, weight, 60), linear_heads(x, weight, 0)
    expected = torch.einsum("mhk,hkn->mhn", x.double(), weight.double()).to(dtype)
    error = (1e-5 if dtype == torch.float32 else 1e-2) * k**0.5
    torch.testing.assert_close(small, expected, rtol=error, atol=error)
    for first, last in ((0, 1), (3, 4), (5, 13), (7, 30), (59, 60)):
        rows = x[first:last]
        assert torch.equal(linear_heads(rows, weight, len(rows)), small[first:last])
        assert torch.equal(linear_heads(rows, weight, 0), large[first:last])
    mixed = linear_heads(x, weight, 9)
    assert torch.equal(mixed, torch.cat([small[:9], large[9:]]))


@pytest.mark.parametrize("hidden", [96, 576, 8192])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_normalised_row_is_right_and_the_same_in_any_company(hidden: int, threads: int) -> None:
    x = torch.randn(130, hidden) * torch.logspace(-3, 3, 130).unsqueeze(1)
    weight = torch.randn(hidden)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = rms_norm(x, weight, 1e-5, torch.float32)
        wanted = rms_norm_reference(x, weight, 1e-5)
        torch.testing.assert_close(together.double(), wanted, rtol=1e-5, atol=1e-6)
        for m in (1, 2, 7, 64):
            parts = [rms_norm(part, weight, 1e-5, torch.float32) for part in x.split(m)]
            assert torch.equal(torch.cat(parts), together), m
    finally:
        torch.set_num_threads(before)
