"""Claims: natively chosen tokens are those of the torch forms, on every instruction set this
processor has: the largest, what the filters leave, seeded draws; and a row's outcome depends on
that row alone, not on its company or the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from osaurus.engine.sampler import TokenSampler, _candidates, sample_rows
from osaurus.kernels.native import choice
from osaurus.kernels.native.choice import Filters
from osaurus.kernels.native.library import kernel_set, kernel_sets, native, use_kernel_set
from osaurus.kernels.sample import best_scores, noise_key
from osaurus.types.sampling import SamplingParams

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)

SETS = kernel_sets() if native().library else ()
VOCABS = [1, 2, 15, 16, 63, 65, 900, 16384, 16385, 40000]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before, threads = kernel_set(), torch.get_num_threads()
    yield
    use_kernel_set(before)
    torch.set_num_threads(threads)


def logits(rows: int, vocab: int, seed: int, spread: float, *, tied: bool = False) -> Tensor:
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return (x * 2).round() / 2 if tied else x


shapes = dict(
    name=st.sampled_from(SETS),
    vocab=st.sampled_from(VOCABS),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.3, 2.5, 8.0]),
    tied=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 5), spoilt=st.sampled_from([None, math.nan, math.inf, -math.inf]), **shapes
)
def test_the_largest_is_the_first_of_the_largest_and_what_is_not_finite_is_told(
    name: str, vocab: int, seed: int, spread: float, tied: bool, rows: int, spoilt: float | None
) -> None:
    use_kernel_set(name)
    x = logits(rows, vocab, seed, spread, tied=tied)
    wanted = x.argmax(dim=-1).tolist()
    if spoilt is not None:
        x[seed % rows, seed % vocab] = spoilt
    places, finite = choice.largest(x)
    for i in range(rows):
        is_spoilt = spoilt is not None and i == seed % rows
        assert finite[i] == (not is_spoilt)
        if not is_spoilt:
            assert places[i] == wanted[i]


@settings(max_examples=200, deadline=None)
@given(
    temperature=st.sampled_from([0.05, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40, 512, 5000]),
    top_p=st.sampled_from([1.0, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 1.0]),
    banned=st.booleans(),
    **shapes,
)
def test_what_the_filters_leave_is_what_the_torch_form_leaves(
    name: str,
    vocab: int,
    seed: int,
    spread: float,
    tied: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    banned: bool,
) -> None:
    use_kernel_set(name)
    row = logits(1, vocab, seed, spread, tied=tied)[0]
    if banned:
        row[seed % vocab] = -math.inf
    found = choice.candidates(row, Filters(temperature, top_k, top_p, min_p))
    if banned and vocab == 1:
        assert found is None
        return
    assert found is not None
    scores, ids, log_total = found
    assert math.isclose(
        log_total, float(torch.logsumexp(row.double() / temperature, 0)), abs_tol=2e-5, rel_tol=1e-6
    )
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted_scores, wanted = _candidates(row / temperature, params)
    # Those at minus infinity have no chance in either form, and some order of their own.
    wanted = wanted[wanted_scores > -math.inf]
    wanted_scores, order = wanted_scores[wanted_scores > -math.inf].sort(
        descending=True, stable=True
    )
    wanted = wanted[order]
    shorter = min(ids.numel(), wanted.numel())
    if ids.numel() != wanted.numel():
        # Only rounding may move the nucleus' end: the weight before it is top-p itself.
        best = (row.double() / temperature).sort(descending=True).values
        weights = torch.softmax(best[: top_k or vocab], 0)
        assert abs(float(weights[:shorter].sum()) - top_p) < 1e-5
    assert torch.equal(ids[:shorter], wanted[:shorter])
    assert torch.equal(scores[:shorter], wanted_scores[:shorter])


@settings(max_examples=150, deadline=None)
@given(
    temperature=st.sampled_from([0.05, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.05]),
    position=st.integers(0, 5000),
    **shapes,
)
def test_draws_are_those_of_the_torch_form(
    name: str,
    vocab: int,
    seed: int,
    spread: float,
    tied: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    position: int,
) -> None:
    use_kernel_set(name)
    # Of equal scores alone a nucleus may end exactly at top-p, where rounding decides.
    x = logits(4, vocab, seed, spread or 0.1, tied=tied and spread > 0)
    filters = Filters(temperature, top_k, top_p, min_p)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = choice.draw(list(x), [filters] * 4, [noise_key(seed + i, position) for i in range(4)])
    for i in range(4):
        sampler = TokenSampler(params, seed + i, [], vocab, frozenset())
        assert got[i], "a finite row has something to draw"
        assert sampler.choose(x[i], got[i], position) == sampler.draw(x[i], position)


@pytest.mark.parametrize("name", SETS)
def test_a_row_draws_the_same_in_any_company_with_any_number_of_threads(name: str) -> None:
    use_kernel_set(name)
    vocab = 50_000
    x = logits(6, vocab, 3, 2.5)
    kinds = [
        Filters(),
        Filters(0.7, 40, 0.9, 0.05),
        Filters(1.0, 0, 0.95),
        Filters(1.3, 0, 1.0, 0.02),
        Filters(1.0, 700, 0.5),
        Filters(0.01),
    ]
    keys = [noise_key(i, 17) for i in range(6)]
    alone = [choice.draw([x[i]], [kinds[i]], [keys[i]])[0] for i in range(6)]
    left = [choice.candidates(x[i], kinds[i]) for i in range(6)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for members in ([0, 1, 2, 3, 4, 5], [5, 2], [4, 3, 0], [1, 1, 1]):
            got = choice.draw(
                [x[m] for m in members], [kinds[m] for m in members], [keys[m] for m in members]
            )
            assert got == [alone[m] for m in members]
        for i in range(6):
            again, wanted = choice.candidates(x[i], kinds[i]), left[i]
            assert again is not None
            assert wanted is not None
            assert torch.equal(again[0], wanted[0])
            assert torch.equal(again[1], wanted[1])
            assert again[2] == wanted[2]


@pytest.mark.parametrize("name", SETS)
def test_steps_choose_the_same_with_and_without_the_library(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernel_set(name)
    x = logits(40, 3000, 5, 3.0)
    x[7, 20] = math.nan
    kinds: list[dict] = [
        dict(temperature=0.0),
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
        dict(temperature=1.0, top_p=0.95, logprobs=True, top_logprobs=4),
        dict(temperature=0.0, presence_penalty=1.0, logprobs=True),
    ]

    def run() -> list:
        samplers = [
            TokenSampler(SamplingParams(**kinds[i % 5]), i, [1, 2, 3], 3000, frozenset())
            for i in range(40)
        ]
        return sample_rows(x, samplers, list(range(40)), [0] * 40, lambda i: b"%d" % i)

    natively = run()
    monkeypatch.setattr(choice, "can_choose", lambda _: False)
    plainly = run()
    assert natively[7].token_id is None
    assert [one.token_id for one in natively] == [one.token_id for one in plainly]
    for one, other in zip(natively, plainly, strict=True):
        if one.logprob is None or other.logprob is None:
            assert one.logprob is other.logprob
            continue
        assert math.isclose(one.logprob.logprob, other.logprob.logprob, abs_tol=1e-5)
        assert [t.token_id for t in one.logprob.top] == [t.token_id for t in other.logprob.top]


def test_best_scores_take_the_lower_ids_of_equals() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -1.0, 3.0])
    values, ids = best_scores(row, 5)
    assert (values.tolist(), ids.tolist()) == ([3.0, 3.0, 3.0, 2.0, 2.0], [1, 3, 7, 2, 4])
