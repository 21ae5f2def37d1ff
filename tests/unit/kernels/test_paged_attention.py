"""Claims: both attention forms equal float64 attention; a decode row's bits do not depend on
its neighbours; a prefill row's bits do not depend on how the prompt was cut."""

from __future__ import annotations

import random

import pytest
import torch

from osaurus.kernels.paged_attention import (
    Span,
    attention_reference,
    decode_attention,
    plan_decode,
    plan_prefill,
    prefill_attention,
)

CASES = [  # query heads, kv heads, k dim, v dim, block, window
    (9, 3, 64, 64, 32, None),
    (6, 2, 16, 16, 16, None),
    (4, 4, 32, 24, 8, None),
    (9, 3, 64, 64, 32, 100),
    (6, 1, 16, 16, 16, 33),
]


class _Slots:
    """Some slots' keys and values, scattered over one layer's blocks."""

    def __init__(self, case: tuple, lengths: list[int], dtype: torch.dtype, seed: int) -> None:
        _, self.kv_heads, self.k_dim, self.v_dim, self.block, self.window = case
        self.lengths = lengths
        g = torch.Generator().manual_seed(seed)
        counts = [-(-length // self.block) for length in lengths]
        ids = list(range(sum(counts) + 5))
        random.Random(seed).shuffle(ids)
        width = self.k_dim + self.v_dim
        self.storage = torch.randn(len(ids), self.kv_heads, self.block, width, generator=g).to(
            dtype
        )
        self.tables = []
        for count in counts:
            self.tables.append([ids.pop() for _ in range(count)])

    def span(self, slot: int, first: int, count: int, start: int = 0) -> Span:
        return Span(
            start=start,
            length=count,
            first_position=first,
            blocks=self.tables[slot],
            first_block=0,
        )

    def keys_values(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.storage[self.tables[slot]].permute(0, 2, 1, 3)
        kv = kv.reshape(-1, self.kv_heads, self.k_dim + self.v_dim)[:length]
        return kv[..., : self.k_dim], kv[..., self.k_dim :]


@pytest.mark.parametrize("case", CASES)
def test_decode_rows_equal_float64_attention(case: tuple) -> None:
    slots = _Slots(case, [1, 5, 32, 33, 200, 310], torch.float32, seed=1)
    rows = [(0, 0, 1), (1, 3, 2), (2, 31, 1), (3, 30, 3), (4, 199, 1), (5, 303, 7)]
    spans = [slots.span(*row) for row in rows]
    q = torch.randn(sum(r[2] for r in rows), case[0], case[2]) / case[2] ** 0.5
    plan = plan_decode(spans, slots.block, slots.window, "cpu")
    got = decode_attention(q, slots.storage, plan, slots.k_dim)
    at = 0
    for slot, first, count in rows:
        keys, values = slots.keys_values(slot, first + count)
        wanted = attention_reference(q[at : at + count], keys, values, first, slots.window)
        torch.testing.assert_close(got[at : at + count].double(), wanted, rtol=2e-5, atol=2e-6)
        at += count


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_decode_row_has_the_same_bits_in_any_company(case: tuple, threads: int) -> None:
    lengths = [1, 31, 32, 33, 64, 200, 511, 700]
    slots = _Slots(case, lengths, torch.bfloat16, seed=2)
    q = torch.randn(len(lengths), case[0], case[2])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:

        def run(members: list[int]) -> torch.Tensor:
            spans = [slots.span(m, lengths[m] - 1, 1) for m in members]
            plan = plan_decode(spans, slots.block, slots.window, "cpu")
            return decode_attention(q[members], slots.storage, plan, slots.k_dim)

        alone = [run([m]) for m in range(len(lengths))]
        companies = [list(range(8)), [7, 0], [3, 2, 1], [5, 6, 7, 4], [0, 7, 1, 6, 2]]
        for members in companies:
            together = run(members)
            for row, member in enumerate(members):
                assert torch.equal(together[row], alone[member][0]), (members, member)
    finally:
        torch.set_num_threads(before)


def test_a_lone_product_has_the_bits_of_one_among_several() -> None:
    """One kv head and one block: the row's scores are a single matrix, which torch would
    split over its threads in another way."""
    slots = _Slots((6, 1, 96, 96, 32, None), [30, 20], torch.float32, seed=3)
    q = torch.randn(2, 6, 96, generator=torch.Generator().manual_seed(4))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        both = [slots.span(0, 29, 1), slots.span(1, 19, 1, start=1)]
        together = decode_attention(q, slots.storage, plan_decode(both, 32, None, "cpu"), 96)
        alone = decode_attention(q[:1], slots.storage, plan_decode(both[:1], 32, None, "cpu"), 96)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together[:1], alone)


def test_rows_verified_together_have_the_bits_of_single_rows() -> None:
    case = CASES[0]
    slots = _Slots(case, [300], torch.bfloat16, seed=3)
    q = torch.randn(8, case[0], case[2])
    plan = plan_decode([slots.span(0, 250, 8)], slots.block, None, "cpu")
    together = decode_attention(q, slots.storage, plan, slots.k_dim)
    for row in range(8):
        plan = plan_decode([slots.span(0, 250 + row, 1)], slots.block, None, "cpu")
        alone = decode_attention(q[row : row + 1], slots.storage, plan, slots.k_dim)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_rows_equal_float64_attention(case: tuple, dtype: torch.dtype) -> None:
    slots = _Slots(case, [700], dtype, seed=4)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for first, count in ((0, 1), (0, 150), (31, 1), (150, 333), (600, 100)):
        q = (torch.randn(count, case[0], case[2]) / case[2] ** 0.5).to(dtype)
        plan = plan_prefill(slots.span(0, first, count), slots.block, slots.window, "cpu")
        got = prefill_attention(q, slots.storage, plan, slots.k_dim)
        keys, values = slots.keys_values(0, first + count)
        wanted = attention_reference(q, keys, values, first, slots.window)
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < tolerance, (first, count)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prefill_row_has_the_same_bits_however_the_prompt_is_cut(
    case: tuple, threads: int
) -> None:
    length = 1300
    slots = _Slots(case, [length], torch.bfloat16, seed=5)
    q = torch.randn(length, case[0], case[2]).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:

        def run(sizes: list[int]) -> torch.Tensor:
            parts, first, turn = [], 0, 0
            while first < length:
                count = min(sizes[turn % len(sizes)], length - first)
                span = slots.span(0, first, count)
                plan = plan_prefill(span, slots.block, slots.window, "cpu")
                rows = q[first : first + count]
                parts.append(prefill_attention(rows, slots.storage, plan, slots.k_dim))
                first, turn = first + count, turn + 1
            return torch.cat(parts)

        whole = run([512])
        for sizes in ([length], [256], [100], [1, 37, 200], [511, 1], [64], [700, 300]):
            assert torch.equal(run(sizes), whole), sizes
    finally:
        torch.set_num_threads(before)


def test_stale_values_in_unused_slots_change_nothing() -> None:
    case = CASES[0]
    slots = _Slots(case, [40], torch.bfloat16, seed=6)
    q = torch.randn(1, case[0], case[2])
    plan = plan_decode([slots.span(0, 35, 1)], slots.block, None, "cpu")
    before = decode_attention(q, slots.storage, plan, slots.k_dim)
    slots.storage[slots.tables[0][1], :, 4:] = 1e30
    after = decode_attention(q, slots.storage, plan, slots.k_dim)
    assert torch.equal(before, after)


@pytest.mark.parametrize("window", [None, 20])
def test_a_latent_is_key_and_value_at_once(window: int | None) -> None:
    # Latent 24, rotary part 8: one kv head, no values of their own.
    slots = _Slots((6, 1, 32, 0, 16, window), [70], torch.float32, seed=7)
    q = torch.randn(9, 6, 32) / 32**0.5
    keys, _ = slots.keys_values(0, 70)
    wanted = attention_reference(q, keys, keys[..., :24], 61, window)
    decode = plan_decode([slots.span(0, 61, 9)], 16, window, "cpu")
    got = decode_attention(q, slots.storage, decode, 32, latent_dim=24)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-6)
    prefill = plan_prefill(slots.span(0, 61, 9), 16, window, "cpu")
    got = prefill_attention(q, slots.storage, prefill, 32, latent_dim=24)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-6)
