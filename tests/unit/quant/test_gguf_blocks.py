"""Claim: our decoding of GGUF blocks equals the `gguf` package's, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from osaurus.errors import UnsupportedBundle
from osaurus.quant import gguf as blocks
from osaurus.quant.linear import PackedLinear, UnpackedLinear, fused_linear, quantized_linear

ENCODINGS = sorted(blocks.BLOCK_BYTES)


def _random_blocks(encoding: str, n: int, k: int, seed: int) -> np.ndarray:
    """Random rows quantized by the oracle, so that scales are finite and typical."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0.02, 0.5, (n, k)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[encoding]
    return gguf.quants.quantize(weights, kind)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decoded_weights_equal_the_gguf_package(encoding: str) -> None:
    raw = _random_blocks(encoding, 96, 128, seed=1)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[encoding])
    weight = blocks.decode(encoding, torch.from_numpy(raw).flatten(), (96, 128))
    got = weight.dequantize(torch.float32)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layer", [PackedLinear, UnpackedLinear])
@pytest.mark.parametrize("n", [64, 100])
def test_a_quantized_layer_computes_with_the_stored_weights(
    encoding: str, layer: type, n: int
) -> None:
    raw = _random_blocks(encoding, n, 256, seed=2)
    weight = blocks.decode(encoding, torch.from_numpy(raw).flatten(), (n, 256))
    dense = weight.dequantize(torch.float32)
    bias = torch.randn(n).bfloat16()
    linear = layer(weight, bias)
    x = torch.randn(9, 256).bfloat16()
    wanted = x.float() @ dense.t() + bias.float()
    for num_small in (0, 4, 9):
        got = linear(x, num_small).float()
        assert got.shape == (9, n)
        assert (got - wanted).norm() / wanted.norm() < 6e-3, num_small
    rows = torch.tensor([0, n - 1, 7])
    torch.testing.assert_close(linear.rows(rows), dense[rows], rtol=1e-6, atol=1e-7)
    assert linear.nbytes < dense.nbytes


def test_projections_of_one_form_fuse_and_others_stand_side_by_side() -> None:
    a, b = (
        blocks.decode(
            "Q4_1", torch.from_numpy(_random_blocks("Q4_1", 64, 64, s)).flatten(), (64, 64)
        )
        for s in (3, 4)
    )
    c = blocks.decode(
        "Q8_0", torch.from_numpy(_random_blocks("Q8_0", 32, 64, 5)).flatten(), (32, 64)
    )
    x = torch.randn(3, 64).bfloat16()
    bias = torch.randn(64).bfloat16()
    for weights, biases in (([a, b], [None, None]), ([a, b], [None, bias]), ([a, c], [bias, None])):
        fused = fused_linear(weights, biases)
        parts = [quantized_linear(w, v)(x, 3) for w, v in zip(weights, biases, strict=True)]
        assert torch.equal(fused(x, 3), torch.cat(parts, dim=-1))


def test_an_encoding_we_lack_is_named() -> None:
    with pytest.raises(UnsupportedBundle, match="Q6_K"):
        blocks.decode("Q6_K", torch.zeros(10, dtype=torch.uint8), (1, 256))
