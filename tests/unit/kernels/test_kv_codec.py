"""Claims: signs, sketch and codebooks are the published ones on every machine; the rotation is
its own inverse for any length; packing loses nothing and the table reads what was packed."""

from __future__ import annotations

import pytest
import torch

from osaurus.kernels.kv_codec import (
    CodeTable,
    codebook,
    hadamard,
    nearest,
    num_words,
    pack,
    rotate,
    rotate_back,
    rotation_matrix,
    rotation_signs,
    sketch_matrix,
    unpack,
)

# Positive half, centroid times sqrt(D).
CENTROIDS = {
    (128, 1): [0.7994],
    (128, 2): [0.4525, 1.5052],
    (128, 3): [0.2444, 0.7534, 1.3367, 2.1316],
    (128, 4): [0.1281, 0.3869, 0.6543, 0.9379, 1.2487, 1.6053, 2.0468, 2.6896],
    (64, 2): [0.4521, 1.5000],
    (64, 3): [0.2438, 0.7508, 1.3295, 2.1115],
}


def test_signs_are_the_golden_ones() -> None:
    wanted = "-+++---+++-++---"
    assert "".join("+" if s > 0 else "-" for s in rotation_signs(128, 42)[:16]) == wanted
    assert rotation_signs(128, 42).abs().unique().tolist() == [1.0]


def test_the_sketch_is_the_golden_one() -> None:
    got = sketch_matrix(128, 42)[0, :3]
    torch.testing.assert_close(got, torch.tensor([-0.85265, -0.43150, -0.38431]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dim", "bits"), CENTROIDS)
def test_centroids_are_the_golden_ones(dim: int, bits: int) -> None:
    levels = codebook(dim, bits)
    wanted = torch.tensor(CENTROIDS[dim, bits]) / dim**0.5
    torch.testing.assert_close(levels[1 << (bits - 1) :], wanted, rtol=0, atol=1e-3 / dim**0.5)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_codebooks_ascend_and_are_symmetric(dim: int) -> None:
    for bits in range(1, 9):
        levels = codebook(dim, bits)
        assert levels.dtype == torch.float32
        assert levels.numel() == 1 << bits
        assert (levels.diff() > 0).all()
        assert (levels + levels.flip(0)).abs().max() < 1e-6


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_vectors_of_three_values_have_no_codebook(dim: int) -> None:
    with pytest.raises(ValueError, match="more than 3"):
        codebook(dim, 2)


def test_the_nearest_level_counts_midpoints_strictly_below() -> None:
    levels = torch.tensor([-2.0, 0.0, 2.0, 4.0])
    x = torch.tensor([-9.0, -1.0, -0.99, 1.0, 1.01, 3.0, 3.1])
    assert nearest(x, levels).tolist() == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("bits", range(1, 9))
def test_counting_and_searching_find_the_same_level(bits: int) -> None:
    levels = codebook(64, bits)
    midpoints = (levels[1:] + levels[:-1]) / 2
    x = torch.cat([torch.randn(5000) / 8, midpoints, levels])
    assert torch.equal(nearest(x, levels), torch.searchsorted(midpoints, x, side="left"))


def test_hadamard_of_a_power_of_two_is_sylvesters_matrix() -> None:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    wanted = two
    for _ in range(4):
        wanted = torch.kron(two, wanted)
    torch.testing.assert_close(hadamard(torch.eye(32)), wanted / 32**0.5)


@pytest.mark.parametrize("dim", [4, 5, 64, 80, 96, 128, 160, 192, 256])
def test_the_rotation_is_orthogonal_for_any_length(dim: int) -> None:
    x, signs = torch.randn(50, dim), rotation_signs(dim, 42)
    y = rotate(x, signs)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate_back(y, signs), x)
    torch.testing.assert_close(x @ rotation_matrix(dim, 42), y)
    torch.testing.assert_close(y @ rotation_matrix(dim, 42).T, x)


def test_lengths_between_powers_of_two_are_cut_into_descending_ones() -> None:
    x = torch.randn(7, 96)
    parts = [hadamard(x[:, :64]), hadamard(x[:, 64:])]
    assert torch.equal(hadamard(x), torch.cat(parts, dim=-1))


def test_a_vectors_rotation_does_not_depend_on_its_company() -> None:
    x, signs = torch.randn(200, 96), rotation_signs(96, 42)
    together = rotate(x, signs)
    assert all(torch.equal(rotate(x[i], signs), together[i]) for i in range(200))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim", [4, 31, 64, 80, 128])
def test_packing_loses_nothing_and_the_table_reads_it(bits: int, dim: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 5, dim))
    codes[0] = (1 << bits) - 1
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (3, 5, num_words(dim, bits))
    assert torch.equal(unpack(words, bits, dim), codes)
    levels = torch.randn(1 << bits)
    assert torch.equal(CodeTable(levels)(words, dim), levels[codes])


def test_words_are_little_endian_and_codes_never_cross_them() -> None:
    # Ten 3-bit codes a word, the top two bits zero; then the eleventh alone.
    words = pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 1, 7, 5]), 3)
    wanted = sum(code << 3 * i for i, code in enumerate([1, 2, 3, 4, 5, 6, 7, 0, 1, 7]))
    assert words.tolist() == [wanted, 5]
    assert pack(torch.ones(32, dtype=torch.int64), 1).tolist() == [-1]
