"""Claims: native sums over TurboQuant's blocks are those of its torch forms, on every instruction
set this processor has; a pair's sums do not depend on the pairs and queries beside it or on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from osaurus.kernels.native.library import kernel_set, kernel_sets, native, use_kernel_set
from osaurus.topology.codecs.turboquant import TurboQuantCodec

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)

SETS = kernel_sets() if native().library else ()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before, threads = kernel_set(), torch.get_num_threads()
    yield
    use_kernel_set(before)
    torch.set_num_threads(threads)


class _Blocks:
    """Coded blocks, and pairs of rows with them."""

    def __init__(
        self, codec: TurboQuantCodec, block: int, dims: tuple[int, int], seed: int
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.codec, self.block, self.dims = codec, block, dims
        self.heads, self.per_head, rows = 1 + seed % 3, 1 + seed % 7, 3
        kv = torch.randn(6, self.heads, block, sum(dims), generator=g) * (1 + seed % 5)
        kv[2, 0, 0] = 0.0
        self.storage = codec.encode(kv)
        self.pair_row = torch.tensor([0, 0, 1, 2, 2, 2, 2])
        self.pair_block = torch.tensor([5, 0, 3, 2, 1, 4, 3])
        q = torch.randn(rows, self.heads * self.per_head, dims[0], generator=g)
        self.queries = codec.rotate_queries(q).view(rows, self.heads, self.per_head, -1)
        self.weights = torch.rand(7, self.heads, self.per_head, block, generator=g)

    def scores(self, pairs: list[int], heads: slice = slice(None)) -> Tensor:
        native = self.codec.native()
        assert native is not None
        queries = self.queries[:, :, heads]
        out = torch.full((len(pairs), self.heads, queries.shape[2], self.block), float("nan"))
        blocks, rows = self.pair_block[pairs], self.pair_row[pairs]
        native.scores(self.storage, blocks, rows, queries, out)
        return out

    def sums(self, pairs: list[int], heads: slice = slice(None)) -> Tensor:
        native = self.codec.native()
        assert native is not None
        weights = self.weights[pairs][:, :, heads].contiguous()
        out = torch.full((*weights.shape[:3], self.dims[1]), float("nan"))
        native.sums(self.storage, self.pair_block[pairs], weights, out)
        return out


shapes = dict(
    name=st.sampled_from(SETS),
    key_bits=st.integers(2, 8),
    value_bits=st.integers(2, 8),
    dims=st.sampled_from([(64, 64), (128, 128), (96, 32), (4, 20), (80, 256), (37, 50)]),
    block=st.sampled_from([1, 8, 16, 24, 32, 64]),
    is_qjl=st.booleans(),
    seed=st.integers(0, 1000),
)


def _made(
    key_bits: int, value_bits: int, dims: tuple[int, int], block: int, is_qjl: bool, seed: int
) -> _Blocks:
    codec = TurboQuantCodec(
        key_bits,
        value_bits,
        k_dim=dims[0],
        v_dim=dims[1],
        block_tokens=block,
        key_estimator="qjl" if is_qjl else "mse",
    )
    return _Blocks(codec, block, dims, seed)


@settings(max_examples=100, deadline=None)
@given(**shapes)
def test_sums_are_those_of_the_torch_form(
    name: str,
    key_bits: int,
    value_bits: int,
    dims: tuple[int, int],
    block: int,
    is_qjl: bool,
    seed: int,
) -> None:
    use_kernel_set(name)
    made = _made(key_bits, value_bits, dims, block, is_qjl, seed)
    every = list(range(7))
    coded = made.storage[made.pair_block]
    keys, values = made.codec.keys(coded).double(), made.codec.values(coded).double()
    wanted = made.queries[made.pair_row].double() @ keys.transpose(-1, -2)
    size = made.queries.norm(dim=-1).max() * keys.norm(dim=-1).max()
    torch.testing.assert_close(made.scores(every).double(), wanted, rtol=0, atol=1e-6 * float(size))
    wanted = made.weights.double() @ values
    size = made.weights.sum(-1).max() * values.abs().max()
    torch.testing.assert_close(made.sums(every).double(), wanted, rtol=0, atol=1e-6 * float(size))


@settings(max_examples=40, deadline=None)
@given(**shapes)
def test_a_pair_has_the_bits_it_has_alone(
    name: str,
    key_bits: int,
    value_bits: int,
    dims: tuple[int, int],
    block: int,
    is_qjl: bool,
    seed: int,
) -> None:
    use_kernel_set(name)
    made = _made(key_bits, value_bits, dims, block, is_qjl, seed)
    every = list(range(7))
    scores, sums = made.scores(every), made.sums(every)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for pairs in ([0], [6, 3], [2, 1, 4], every):
            assert torch.equal(made.scores(pairs), scores[pairs])
            assert torch.equal(made.sums(pairs), sums[pairs])
    for head in range(made.per_head):
        one = slice(head, head + 1)
        assert torch.equal(made.scores(every, one), scores[:, :, one])
        assert torch.equal(made.sums(every, one), sums[:, :, one])
