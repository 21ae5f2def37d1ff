"""Claims: attention over exact and coded blocks equals decoding everything first; a row's bits
depend on nothing beside it; rows without coded blocks have the bits of plain decoding."""

from __future__ import annotations

import random

import pytest
import torch

from osaurus.kernels import coded_attention as kernel
from osaurus.kernels.coded_attention import (
    CodedPlan,
    CodedStorage,
    coded_attention,
    coded_attention_reference,
    coded_id,
    plan_coded,
)
from osaurus.kernels.paged_attention import DecodePlan, Span, decode_attention, plan_decode
from osaurus.topology.base import AttentionTopology
from osaurus.topology.codecs.base import KVCodec, codable_blocks
from osaurus.topology.codecs.choose import make_codec
from osaurus.topology.codecs.turboquant import TurboQuantCodec
from osaurus.types.cache import KVMode

CASES = [  # query heads, kv heads, k dim, v dim, block
    (9, 3, 64, 64, 32),
    (8, 2, 128, 128, 16),
    (4, 4, 64, 128, 8),
    (6, 1, 96, 32, 16),
]
MODES = [
    "turbo 3 mse",
    "turbo 3 qjl",
    "turbo 3 qjl torch",
    "turbo 4 mse torch",
    "turbo 4 mse",
    "turbo 6 qjl",
    "affine 4",
    "affine 8",
]
LENGTHS = [1, 63, 64, 128, 200, 333, 700]


class _InTorch(TurboQuantCodec):
    """As where there is no native library."""

    def native(self) -> None:
        return None


def _codec(mode: str, case: tuple) -> KVCodec:
    kind, bits, *rest = mode.split()
    _, kv_heads, k_dim, v_dim, block = case
    if kind == "turbo":
        made = _InTorch if "torch" in rest else TurboQuantCodec
        return made(
            int(bits),
            int(bits),
            k_dim=k_dim,
            v_dim=v_dim,
            block_tokens=block,
            key_estimator="qjl" if "qjl" in rest else "mse",
        )
    topology = AttentionTopology(num_kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim)
    return make_codec(KVMode("affine", int(bits), 32), topology, block)


class _Slots:
    """Some slots' blocks, scattered; what may be coded is, but for a block here and there, as
    if it had not fitted. The raw blocks of coded ones are overwritten."""

    def __init__(self, case: tuple, mode: str, dtype: torch.dtype, seed: int) -> None:
        _, kv_heads, self.k_dim, v_dim, self.block = case
        g, r = torch.Generator().manual_seed(seed), random.Random(seed)
        self.codec = _codec(mode, case)
        counts = [-(-length // self.block) for length in LENGTHS]
        ids, free = list(range(sum(counts) + 5)), list(range(sum(counts) + 3))
        r.shuffle(ids)
        r.shuffle(free)
        width = self.k_dim + v_dim
        self.storage = torch.randn(len(ids), kv_heads, self.block, width, generator=g).to(dtype)
        coded = torch.zeros(len(free), kv_heads, self.codec.block_bytes, dtype=torch.uint8)
        self.coded = CodedStorage(coded, self.codec)
        self.tables: list[list[int]] = []
        for count, length in zip(counts, LENGTHS, strict=True):
            table = [ids.pop() for _ in range(count)]
            for index in codable_blocks(length, self.block):
                if index % 7 == 5:
                    continue
                place, raw = free.pop(), table[index]
                coded[place] = self.codec.encode(self.storage[raw : raw + 1])[0]
                self.storage[raw] = 1e30
                table[index] = coded_id(place)
            self.tables.append(table)

    def span(self, slot: int, first: int, count: int) -> Span:
        return Span(
            start=0,
            length=count,
            first_position=first,
            blocks=self.tables[slot],
            first_block=0,
        )

    def run(self, q: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        plan = plan_coded(spans, self.block, "cpu")
        if isinstance(plan, DecodePlan):
            return decode_attention(q, self.storage, plan, self.k_dim)
        return coded_attention(q, self.storage, self.coded, plan, self.k_dim)


def _queries(case: tuple, rows: int) -> torch.Tensor:
    return torch.randn(rows, case[0], case[2]) / case[2] ** 0.5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_rows_equal_attention_over_the_decoded_blocks(case: tuple, mode: str) -> None:
    slots = _Slots(case, mode, torch.float32, seed=1)
    rows = [(slot, length - 1, 1) for slot, length in enumerate(LENGTHS)]
    rows += [(5, 325, 8), (6, 695, 3)]
    q, at = _queries(case, sum(row[2] for row in rows)), 0
    got = slots.run(q, [slots.span(*row) for row in rows])
    for row in rows:
        part = slice(at, at + row[2])
        wanted = coded_attention_reference(
            q[part], slots.storage, slots.coded, slots.span(*row), slots.k_dim
        )
        torch.testing.assert_close(got[part].double(), wanted, rtol=5e-5, atol=5e-6)
        at += row[2]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["turbo 3 mse", "turbo 3 qjl", "turbo 3 qjl torch", "affine 8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company(case: tuple, mode: str, threads: int) -> None:
    slots = _Slots(case, mode, torch.bfloat16, seed=2)
    q = _queries(case, len(LENGTHS))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:

        def run(members: list[int]) -> torch.Tensor:
            return slots.run(q[members], [slots.span(m, LENGTHS[m] - 1, 1) for m in members])

        alone = [run([m]) for m in range(len(LENGTHS))]
        for members in ([0, 1, 2, 3, 4, 5, 6], [6, 0], [3, 2, 1], [5, 6, 4], [0, 6, 1, 5, 2]):
            together = run(members)
            for row, member in enumerate(members):
                assert torch.equal(together[row], alone[member][0]), (members, member)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["turbo 3 mse", "turbo 3 qjl", "turbo 3 qjl torch", "affine 8"])
def test_rows_verified_together_have_the_bits_of_single_rows(mode: str) -> None:
    case = CASES[0]
    slots = _Slots(case, mode, torch.bfloat16, seed=3)
    q = _queries(case, 8)
    together = slots.run(q, [slots.span(6, 690, 8)])
    for row in range(8):
        assert torch.equal(
            slots.run(q[row : row + 1], [slots.span(6, 690 + row, 1)])[0], together[row]
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["turbo 3 mse", "turbo 3 qjl", "turbo 3 qjl torch", "affine 8"])
def test_where_tiles_end_changes_no_bit(
    case: tuple, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = _Slots(case, mode, torch.bfloat16, seed=4)
    q, spans = _queries(case, 3), [slots.span(s, LENGTHS[s] - 1, 1) for s in (6, 5, 4)]
    whole = slots.run(q, spans)
    for tile_bytes in (1, 100_000, 300_000, 1 << 30):
        monkeypatch.setattr(kernel, "TILE_BYTES", tile_bytes)
        assert torch.equal(slots.run(q, spans), whole), tile_bytes


@pytest.mark.parametrize("case", CASES)
def test_rows_without_coded_blocks_have_the_bits_of_plain_decoding(case: tuple) -> None:
    slots = _Slots(case, "turbo 3 mse", torch.bfloat16, seed=5)
    q = _queries(case, 4)
    short = [slots.span(m, LENGTHS[m] - 1, 1) for m in (0, 1, 2)]
    mixed = slots.run(q, [*short, slots.span(6, 699, 1)])
    plan = plan_decode(short, slots.block, None, "cpu")
    plain = decode_attention(q[:3], slots.storage, plan, slots.k_dim)
    assert torch.equal(mixed[:3], plain)


def test_a_plan_without_coded_blocks_is_the_plain_one() -> None:
    slots = _Slots(CASES[0], "turbo 3 mse", torch.bfloat16, seed=6)
    spans = [slots.span(0, 0, 1), slots.span(2, 60, 4)]
    got, wanted = plan_coded(spans, 32, "cpu"), plan_decode(spans, 32, None, "cpu")
    assert isinstance(got, DecodePlan)
    for name in ("pair_block", "pair_row", "row_pairs", "hidden"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name


def test_a_row_is_never_written_into_a_coded_block() -> None:
    span = Span(start=0, length=1, first_position=40, blocks=[3, coded_id(0), 5], first_block=0)
    with pytest.raises(ValueError, match="position 40"):
        plan_coded([span], 32, "cpu")


def test_block_tables_name_coded_blocks_below_zero() -> None:
    assert [coded_id(i) for i in (0, 1, 7)] == [-1, -2, -8]
    span = Span(
        start=0,
        length=1,
        first_position=100,
        blocks=[9, coded_id(4), coded_id(0), 2],
        first_block=0,
    )
    plan = plan_coded([span], 32, "cpu")
    assert isinstance(plan, CodedPlan)
    assert plan.exact.pair_block.tolist() == [9, 2]
    assert plan.pair_block.tolist() == [4, 0]
