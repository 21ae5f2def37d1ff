"""Claims: whatever bits and groups a weight has, every layer form computes with the stored
values, and a decode row's bits are those it has alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from osaurus.kernels import quant_matmul
from osaurus.kernels.native.library import native
from osaurus.quant.dense import DenseLinear
from osaurus.quant.grouped import SLAB, GroupedWeight, UndecodedWeight
from osaurus.quant.linear import (
    DenseEmbedding,
    JoinedLinear,
    NativeEmbedding,
    NativeLinear,
    PackedLinear,
    QuantizedEmbedding,
    ReorderedLinear,
    UnpackedLinear,
    fused_linear,
    grouped_embedding,
    grouped_linear,
    is_better_dense,
    quantized_linear,
)

FORMS = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (16, 32, 64, 128, 256)]
needs_packing = pytest.mark.skipif(
    quant_matmul.packed_layout() is None, reason="no packed layout on this processor"
)


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every claim holds with native kernels and without."""
    if request.param == "torch":
        monkeypatch.setattr("osaurus.quant.linear.can_be_native", lambda weight: False)
    elif native().library is None:
        pytest.skip(native().reason)
    return request.param


def made(
    bits: int, group: int, n: int, k: int = 256, seed: int = 0, dtype: torch.dtype = torch.float16
) -> GroupedWeight:
    """Codes of any value; scales and biases as quantizers make them: the middle near zero."""
    g = torch.Generator().manual_seed(seed)
    scale = (torch.rand(n, k // group, generator=g) + 0.5) / (1 << bits)
    middle = 0.3 * torch.randn(n, k // group, generator=g) * scale
    return GroupedWeight(
        bits=bits,
        group_size=group,
        codes=torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=g),
        scale=scale.to(dtype),
        bias=(middle - scale * (1 << bits) / 2).to(dtype),
    )


def assert_computes(layer: object, weight: GroupedWeight, bias: torch.Tensor) -> None:
    dense = weight.dequantize(torch.float32)
    x = torch.randn(9, dense.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = x.float() @ dense.t() + bias.float()
    for num_small in (0, 4, 9):
        got = layer(x, num_small).float()  # type: ignore[operator]
        assert got.shape == wanted.shape
        assert (got - wanted).norm() / wanted.norm() < 6e-3, num_small


@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize("n", [64, 100])
def test_every_form_computes_with_the_stored_weights(bits: int, group: int, n: int) -> None:
    weight = made(bits, group, n)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert_computes(grouped_linear(weight, bias), weight, bias)
    for form in (PackedLinear, UnpackedLinear):
        if form is PackedLinear and quant_matmul.packed_layout() is None:
            continue
        layer = form(weight, bias)
        assert_computes(layer, weight, bias)
        rows = torch.tensor([0, n - 1, 7])
        torch.testing.assert_close(
            layer.rows(rows), weight.dequantize(torch.float32)[rows], rtol=1e-6, atol=1e-7
        )


@needs_packing
@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_a_decode_row_has_the_bits_it_has_alone(bits: int, group: int) -> None:
    layer = grouped_linear(made(bits, group, 192, 544 // group * group + 256))
    x = torch.randn(19, layer.in_features, generator=torch.Generator().manual_seed(3)).bfloat16()
    together = layer(x, 19)
    for m in (1, 2, 3, 8, 16, 17):
        for start in (0, 19 - m):
            assert torch.equal(layer(x[start : start + m], m), together[start : start + m]), m


@needs_packing
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_what_each_form_takes_in_memory(bits: int, kernels: str) -> None:
    """Codes of up to 4 bits take 4, others 8; in groups of 16 torch's form of the latter is
    better dense."""
    n, k = 64, 1024
    for group in (16, 32, 64):
        weight = made(bits, group, n, k)
        layer = grouped_linear(weight)
        codes = n * k * (1 if bits > 4 else 0.5)
        if kernels == "native":
            assert isinstance(layer, NativeLinear)
            assert layer.nbytes == codes + n * k // group * 2 * 2
        elif bits > 4 and group == 16:
            assert is_better_dense(weight)
            assert isinstance(layer, DenseLinear)
        else:
            assert isinstance(layer, PackedLinear)
            assert codes < layer.nbytes <= 2 * n * k


@needs_packing
def test_scales_are_rounded_around_the_middle_code() -> None:
    """A group far from zero for its width: what the bfloat16 scale loses must not move it."""
    for bits in (2, 3, 4, 5, 6, 8):
        weight = made(bits, 32, 64, dtype=torch.float32)
        layer = grouped_linear(weight)
        got = layer(torch.eye(256).bfloat16(), 256).float().t()
        error = (got - weight.dequantize(torch.float32)).view(64, 8, 32)
        step = weight.scale.unsqueeze(-1)
        assert ((error / step).mean(dim=-1).abs() < 0.02 + (1 << bits) / 512).all(), bits


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_an_offset_of_so_many_scales_everywhere_is_not_stored(bits: int, kernels: str) -> None:
    if kernels != "native":
        pytest.skip("a matter of the native form")
    weight = made(bits, 32, 128)
    centred = replace(weight, bias=-(1 << (bits - 1)) * weight.scale)
    nearly = replace(centred, bias=centred.bias.clone())
    nearly.bias[-1, -1] += 0.25
    stored, left = grouped_linear(nearly), grouped_linear(centred)
    assert stored.nbytes - left.nbytes == 128 * 256 // 32 * 2
    for layer, wanted in ((stored, nearly), (left, centred)):
        assert_computes(layer, wanted, torch.zeros(128))


def test_projections_of_one_form_fuse_and_others_stand_side_by_side() -> None:
    a, b, c = made(4, 32, 64, seed=3), made(4, 32, 64, seed=4), made(8, 32, 32, seed=5)
    x = torch.randn(3, 256).bfloat16()
    bias = torch.randn(64).bfloat16()
    for weights, biases in (([a, b], [None, None]), ([a, b], [None, bias]), ([a, c], [bias, None])):
        fused = fused_linear(weights, biases)
        parts = [quantized_linear(w, v)(x, 3) for w, v in zip(weights, biases, strict=True)]
        assert torch.equal(fused(x, 3), torch.cat(parts, dim=-1))


def _reordered(order: torch.Tensor, seed: int = 6) -> GroupedWeight:
    plain = made(4, 64, 64, seed=seed)
    return GroupedWeight(
        bits=4,
        group_size=64,
        codes=plain.codes,
        scale=plain.scale,
        bias=plain.bias,
        order=order,
    )


def test_columns_in_another_order_are_met_by_their_inputs() -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(7))
    weight = _reordered(order)
    layer = grouped_linear(weight)
    assert isinstance(layer, ReorderedLinear)
    assert_computes(layer, weight, torch.zeros(64))
    same = fused_linear([weight, _reordered(order, seed=8)], [None, None])
    assert isinstance(same, ReorderedLinear)
    other = fused_linear([weight, _reordered(order.flip(0), seed=8)], [None, None])
    assert isinstance(other, JoinedLinear)
    assert isinstance(grouped_embedding(weight), DenseEmbedding)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (6, 16), (3, 16), (8, 64)])
def test_an_embedding_is_built_from_rows_decoded_in_pieces(
    bits: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = 200, 64
    monkeypatch.setattr("osaurus.quant.grouped.SLAB", 64 * k)
    assert 64 * k < SLAB
    weight = made(bits, group, n, k)
    asked: list[slice] = []

    def read(rows: slice) -> GroupedWeight:
        asked.append(rows)
        return weight.select_rows(rows)

    lazy = UndecodedWeight(
        shape=(n, k), bits=bits, group_size=group, device=torch.device("cpu"), read=read
    )
    embedding, whole = grouped_embedding(lazy), grouped_embedding(weight)
    assert [rows.stop - rows.start for rows in asked] == [64, 64, 64, 8]
    hidden = torch.randn(3, k, generator=torch.Generator().manual_seed(9))
    assert torch.equal(embedding.logits(hidden), whole.logits(hidden))
    ids = torch.tensor([0, 199, 64, 63])
    assert torch.equal(embedding(ids), whole(ids))
    if isinstance(embedding, QuantizedEmbedding | NativeEmbedding):
        wanted = weight.dequantize(torch.float32)[ids]
        torch.testing.assert_close(embedding(ids), wanted, rtol=1e-6, atol=1e-7)
