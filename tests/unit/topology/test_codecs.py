"""Claims: TurboQuant's errors are the published ones, its sizes those of the table, its odd
inputs come to no harm; affine codes are within half a step; a block's bytes depend on it
alone. That attention reads what `decode` gives is test_coded_attention's claim."""

from __future__ import annotations

import math

import pytest
import torch

from osaurus.topology.base import AttentionTopology
from osaurus.topology.codecs.affine import AffineCodec
from osaurus.topology.codecs.base import KVCodec, codable_blocks, rows_until_coding
from osaurus.topology.codecs.choose import make_codec, why_exact
from osaurus.topology.codecs.turboquant import KeyEstimator, TurboQuantCodec
from osaurus.types.cache import KVMode

BLOCK = 16

# Relative mean squared error of Gaussian vectors, and the bound of the paper.
MSE = {
    (2, 64): 0.1145,
    (2, 128): 0.1160,
    (2, 256): 0.1167,
    (3, 64): 0.0334,
    (3, 128): 0.0340,
    (3, 256): 0.0343,
    (4, 64): 0.0091,
    (4, 128): 0.0093,
    (4, 256): 0.0094,
}
BITS_PER_ELEMENT = [  # head dim, bits, of qjl keys, of values; vectors start on a word
    (128, 3, 3.25, 3.375),
    (128, 4, 4.5, 4.125),
    (64, 3, 3.5, 3.75),
    (64, 4, 5.0, 4.25),
]


def _turbo(
    bits: int, dim: int, estimator: KeyEstimator = "mse", v_dim: int | None = None
) -> TurboQuantCodec:
    return TurboQuantCodec(
        bits,
        bits,
        k_dim=dim,
        v_dim=dim if v_dim is None else v_dim,
        block_tokens=BLOCK,
        key_estimator=estimator,
    )


def _affine(bits: int, group: int, dim: int = 64, v_dim: int = 128) -> AffineCodec:
    return AffineCodec(bits, group, k_dim=dim, v_dim=v_dim, block_tokens=BLOCK)


ALL: list[tuple[str, KVCodec, int]] = [
    *((f"turbo {b} {e}", _turbo(b, 80, e, 48), 128) for b in range(2, 9) for e in ("mse", "qjl")),
    *((f"affine {b}/{g}", _affine(b, g), 192) for b in (4, 8) for g in (32, 64)),
]
codecs = pytest.mark.parametrize(("codec", "width"), [c[1:] for c in ALL], ids=[c[0] for c in ALL])


def _gaussian(blocks: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(blocks, 2, BLOCK, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "dim"), MSE)
def test_the_error_of_gaussian_vectors_is_the_published_one(bits: int, dim: int) -> None:
    codec, kv = _turbo(bits, dim), _gaussian(150, 2 * dim)
    error = (codec.decode(codec.encode(kv)) - kv).square()
    for part, got in ((kv[..., :dim], error[..., :dim]), (kv[..., dim:], error[..., dim:])):
        relative = float((got.sum(-1) / part.square().sum(-1)).mean())
        assert relative == pytest.approx(MSE[bits, dim], rel=0.03)
        assert relative < math.sqrt(3) * math.pi / 2 * 4.0**-bits


@pytest.mark.parametrize(
    ("bits", "spread", "error", "cosine"), [(3, 0.180, 0.186, 0.921), (4, 0.052, 0.052, 0.975)]
)
def test_qjl_keys_have_unbiased_products_and_the_published_spread(
    bits: int, spread: float, error: float, cosine: float
) -> None:
    dim = 128
    codec, kv = _turbo(bits, dim, "qjl"), _gaussian(150, 2 * dim)
    keys, decoded = kv[..., :dim], codec.decode(codec.encode(kv))[..., :dim]
    square = keys.square().sum(-1)
    assert float(((keys * decoded).sum(-1) / square).mean()) == pytest.approx(1.0, abs=0.004)
    relative = (decoded - keys).square().sum(-1) / square
    assert float(relative.mean()) == pytest.approx(error, rel=0.04)
    got_cosine = torch.cosine_similarity(keys, decoded, dim=-1).mean()
    assert float(got_cosine) == pytest.approx(cosine, abs=0.004)
    queries = torch.randn(2000, dim)
    wanted = torch.einsum("qd,...d->...q", queries, keys)
    off = torch.einsum("qd,...d->...q", queries, decoded) - wanted
    scale = square.unsqueeze(-1) * queries.square().sum(-1) / dim
    assert float((off.square() / scale).mean()) == pytest.approx(spread, rel=0.05)
    assert abs(float((off / scale.sqrt()).mean())) < 0.005


@pytest.mark.parametrize(("bits", "slope"), [(3, 0.966), (4, 0.990)])
def test_mse_keys_shrink_by_what_is_published(bits: int, slope: float) -> None:
    dim = 128
    codec, kv = _turbo(bits, dim), _gaussian(150, 2 * dim)
    keys, decoded = kv[..., :dim], codec.decode(codec.encode(kv))[..., :dim]
    got = ((keys * decoded).sum(-1) / keys.square().sum(-1)).mean()
    assert float(got) == pytest.approx(slope, abs=0.003)


@pytest.mark.parametrize(("dim", "bits", "key_bits", "value_bits"), BITS_PER_ELEMENT)
def test_sizes_are_those_of_the_table(
    dim: int, bits: int, key_bits: float, value_bits: float
) -> None:
    elements = BLOCK * dim
    qjl, mse = _turbo(bits, dim, "qjl").block_bytes, _turbo(bits, dim, "mse").block_bytes
    assert qjl * 8 == (key_bits + value_bits) * elements
    assert mse * 8 == 2 * value_bits * elements


def test_affine_sizes_are_codes_and_two_halves_a_group() -> None:
    for bits, group in ((4, 32), (4, 64), (8, 32), (8, 64)):
        wanted = (bits + 32 / group) * BLOCK * (64 + 128) / 8
        assert _affine(bits, group).block_bytes == wanted


@codecs
def test_a_zero_vector_stays_exactly_zero(codec: KVCodec, width: int) -> None:
    kv = _gaussian(2, width)
    kv[0, 1, 3] = 0
    decoded = codec.decode(codec.encode(kv))
    assert codec.fits(kv).all()
    assert (decoded[0, 1, 3] == 0).all()
    assert decoded.isfinite().all()


@pytest.mark.parametrize("estimator", ["mse", "qjl"])
def test_one_hot_vectors_stay_finite_and_of_about_their_length(estimator: KeyEstimator) -> None:
    dim = 64
    codec = _turbo(3, dim, estimator)
    one_hot = torch.eye(dim).view(2, 2, BLOCK, dim)
    decoded = codec.decode(codec.encode(torch.cat([one_hot, one_hot], dim=-1)))
    assert decoded.isfinite().all()
    assert (decoded[..., dim:].norm(dim=-1) - 1).abs().max() < 0.3


@codecs
@pytest.mark.parametrize("bad", [3e38, float("inf"), float("nan")])
def test_blocks_that_float16_cannot_scale_do_not_fit(
    codec: KVCodec, width: int, bad: float
) -> None:
    kv = _gaussian(4, width)
    kv[1, 0, 2, 5] = bad
    kv[2, 1, 15, width - 1] = bad
    assert codec.fits(kv).tolist() == [True, False, False, True]


@pytest.mark.parametrize("estimator", ["mse", "qjl"])
def test_a_norm_just_within_float16_fits_and_one_beyond_does_not(estimator: KeyEstimator) -> None:
    codec, kv = _turbo(3, 64, estimator), torch.zeros(2, 1, BLOCK, 128)
    kv[0, 0, 0, 7], kv[1, 0, 0, 7] = 65504, 65530
    assert codec.fits(kv).tolist() == [True, False]


@codecs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoded_values_have_the_dtype_that_was_asked(
    codec: KVCodec, width: int, dtype: torch.dtype
) -> None:
    coded = codec.encode(_gaussian(3, width).to(dtype))
    assert coded.dtype == torch.uint8
    assert coded.shape == (3, 2, codec.block_bytes)
    decoded = codec.decode(coded, dtype)
    assert decoded.dtype == dtype
    assert decoded.shape == (3, 2, BLOCK, width)
    assert codec.decode(coded).dtype == torch.float32


@codecs
def test_the_reader_s_factors_are_the_decoded_block(codec: KVCodec, width: int) -> None:
    k_dim = {128: 80, 192: 64}[width]
    coded = codec.encode(_gaussian(3, width))
    decoded = codec.decode(coded)
    q = torch.randn(6, 5, k_dim)
    wanted = torch.einsum("thd,nkbd->nkbth", q, decoded[..., :k_dim])
    got = torch.einsum("thd,nkbd->nkbth", codec.rotate_queries(q), codec.keys(coded))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    weights = torch.rand(6, 5, 3 * 2 * BLOCK)
    wanted = weights @ decoded[..., k_dim:].flatten(0, 2)
    got = codec.rotate_back(weights @ codec.values(coded).flatten(0, 2))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@codecs
@pytest.mark.parametrize("threads", [1, 2])
def test_a_block_s_bytes_do_not_depend_on_its_company(
    codec: KVCodec, width: int, threads: int
) -> None:
    kv = _gaussian(40, width).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = codec.encode(kv)
        for block in range(40):
            assert torch.equal(codec.encode(kv[block : block + 1])[0], together[block])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_affine_values_are_within_half_a_step(bits: int, group: int) -> None:
    codec, kv = _affine(bits, group), _gaussian(20, 192) * 3 + 5
    error = (codec.decode(codec.encode(kv)) - kv).abs().unflatten(-1, (-1, group)).amax(-1)
    low, high = kv.unflatten(-1, (-1, group)).aminmax(dim=-1)
    step = (high - low) / ((1 << bits) - 1)
    # Beyond half a step: what float16 takes from the bias, and from the scale over all steps.
    rounding = 2.0**-11 * (low.abs() + (high - low))
    assert (error <= step / 2 + rounding + 1e-6).all()


def test_affine_groups_of_one_value_are_kept() -> None:
    kv = torch.full((1, 1, BLOCK, 192), 1.5)
    codec = _affine(4, 64)
    assert torch.equal(codec.decode(codec.encode(kv)), kv)


@pytest.mark.parametrize("block_tokens", [1, 2, 4, 16, 32])
def test_the_first_four_and_the_newest_sixty_four_tokens_are_never_codable(
    block_tokens: int,
) -> None:
    for num_tokens in range(400):
        blocks = codable_blocks(num_tokens, block_tokens)
        if blocks:
            assert blocks.start * block_tokens >= 4
            assert blocks.stop * block_tokens <= num_tokens - 64
    assert list(codable_blocks(191, 32)) == [1, 2]
    assert list(codable_blocks(192, 32)) == [1, 2, 3]


@pytest.mark.parametrize("block_tokens", [8, 16, 32])
def test_rows_that_run_together_read_the_codes_of_single_rows(block_tokens: int) -> None:
    assert rows_until_coding(157, 32) == 3
    for first in range(300):
        count = rows_until_coding(first, block_tokens)
        assert count >= 1
        rows = range(first, first + count)
        assert {codable_blocks(p, block_tokens) for p in rows} == {
            codable_blocks(first, block_tokens)
        }


FULL = AttentionTopology(num_kv_heads=2, k_dim=64, v_dim=64)


def test_modes_and_layers_decide_whether_blocks_are_coded() -> None:
    window = AttentionTopology(num_kv_heads=2, k_dim=64, v_dim=64, window=512)
    odd = AttentionTopology(num_kv_heads=2, k_dim=80, v_dim=3)
    turbo, affine = KVMode("turbo", 3, 3), KVMode("affine", 8, 64)
    assert why_exact(turbo, FULL) == ""
    assert why_exact(affine, FULL) == ""
    assert "none" in why_exact(KVMode("none"), FULL)
    assert "engine_selected" in why_exact(KVMode("engine_selected"), FULL)
    assert "sliding" in why_exact(turbo, window)
    assert "[3, 80]" in why_exact(turbo, odd)
    assert "multiples of 64" in why_exact(affine, odd)
    with pytest.raises(ValueError, match="sliding"):
        make_codec(turbo, window, BLOCK)
    assert make_codec(KVMode("turbo", 3, 4), FULL, BLOCK).tag.startswith("turbo(3,4,")
    assert make_codec(KVMode("affine", 4, 32), FULL, BLOCK).tag == "affine(4,32)"


def test_bits_and_dims_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="2 to 8"):
        _turbo(9, 64)
    with pytest.raises(ValueError, match="head dim 3"):
        _turbo(3, 3)
    with pytest.raises(ValueError, match="multiple of 64"):
        _affine(8, 64, 80)
