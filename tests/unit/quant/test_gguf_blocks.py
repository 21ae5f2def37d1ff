"""Claim: our decoding of GGUF blocks equals the `gguf` package's, on random blocks: every code,
every scale a float16 can be, zero and subnormal ones included.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from osaurus.errors import UnsupportedBundle
from osaurus.quant import gguf as blocks
from osaurus.quant.grouped import GroupedWeight

ENCODINGS = sorted(blocks.FORMATS)
#: Where the float16 scales of a block lie; the rest of its bytes may be anything.
SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
#: Zero, the smallest and largest float16, a common one, each in both signs.
EXTREME = np.array([0, 6e-8, 6e-5, 0.01, 65504], dtype=np.float16)
K = 512


def random_blocks(encoding: str, n: int, k: int, seed: int, scales: np.ndarray) -> np.ndarray:
    """[n, row bytes] with random bytes everywhere but in the scales, which are drawn."""
    rng = np.random.default_rng(seed)
    form = blocks.FORMATS[encoding]
    raw = rng.integers(0, 256, (n * k // form.block, form.block_bytes), dtype=np.uint8)
    for at in SCALES_AT[encoding]:
        drawn = rng.choice(scales, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = drawn.reshape(-1, 1).view(np.uint8)
    return raw.reshape(n, -1)


def typical(encoding: str, n: int, k: int, seed: int) -> GroupedWeight:
    scales = np.linspace(0.004, 0.02, 17, dtype=np.float16)
    raw = random_blocks(encoding, n, k, seed, scales)
    return blocks.decode(encoding, torch.from_numpy(raw).flatten(), (n, k))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", ["typical", "extreme"])
def test_decoded_weights_equal_the_gguf_package(encoding: str, kind: str) -> None:
    scales = np.concatenate([EXTREME, -EXTREME])
    if kind == "typical":
        scales = np.linspace(-0.1, 0.1, 33, dtype=np.float16)
    raw = random_blocks(encoding, 48, K, seed=1, scales=scales)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[encoding])
    weight = blocks.decode(encoding, torch.from_numpy(raw).flatten(), (48, K))
    assert weight.is_finite()
    assert int(weight.codes.max()) < 1 << weight.bits
    got = weight.dequantize(torch.float32).numpy()
    # Both have one rounding more than the exact value; where terms cancel it is of the larger.
    step = np.abs(weight.bias.float().numpy()).repeat(weight.group_size, axis=1)
    assert (np.abs(got - wanted) <= 1e-6 * (np.abs(wanted) + step)).all()


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_gguf_package_quantizes_is_read_back(encoding: str) -> None:
    weights = np.random.default_rng(2).normal(0.02, 0.5, (96, 128)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[encoding]
    raw = gguf.quants.quantize(weights, kind)
    weight = blocks.decode(encoding, torch.from_numpy(raw).flatten(), (96, 128))
    wanted = gguf.quants.dequantize(raw, kind)
    np.testing.assert_allclose(weight.dequantize(torch.float32), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_scale_that_is_no_number_shows(encoding: str) -> None:
    scales = np.array([0.01, 0.02, np.nan], dtype=np.float16)
    raw = random_blocks(encoding, 48, K, seed=3, scales=scales)
    assert not blocks.decode(encoding, torch.from_numpy(raw).flatten(), (48, K)).is_finite()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_can_be_decoded_alone(encoding: str) -> None:
    raw = random_blocks(encoding, 8, K, seed=4, scales=EXTREME[1:4])
    data = torch.from_numpy(raw).flatten()
    size = blocks.row_bytes(encoding, K)
    whole = blocks.decode(encoding, data, (8, K)).dequantize(torch.float32)
    part = blocks.decode(encoding, data[3 * size : 5 * size], (2, K)).dequantize(torch.float32)
    assert torch.equal(part, whole[3:5])


def test_an_encoding_we_lack_is_named() -> None:
    with pytest.raises(UnsupportedBundle, match="IQ2_XXS"):
        blocks.decode("IQ2_XXS", torch.zeros(66, dtype=torch.uint8), (1, 256))


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedBundle, match="rows of 128 weights are not whole blocks of 256"):
        blocks.decode("Q6_K", torch.zeros(210, dtype=torch.uint8), (2, 128))
