"""Claims: each setting does what its name says, on its own row only; draws follow the
filtered distribution; equal keys draw equal tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from osaurus.engine.sampler import Sampled, TokenSampler, _candidates, sample_rows
from osaurus.errors import InvalidField
from osaurus.types.sampling import SamplingParams

VOCAB = 50


def _bytes(token_id: int) -> bytes:
    return f"t{token_id}".encode()


def _sampler(
    prompt: tuple[int, ...] = (),
    generated: tuple[int, ...] = (),
    stop: frozenset[int] = frozenset(),
    seed: int = 1,
    vocab: int = VOCAB,
    **params: object,
) -> TokenSampler:
    sampler = TokenSampler(SamplingParams(**params), seed, prompt, vocab, stop)  # type: ignore[arg-type]
    for token in generated:
        sampler.commit(token)
    return sampler


def test_frequency_lowers_by_the_count_and_presence_once() -> None:
    row = torch.zeros(VOCAB)
    lowered = _sampler((1,), (5, 5, 5, 9), frequency_penalty=2.0).process(row, 4)
    assert (lowered[5], lowered[9], lowered[1]) == (-6.0, -2.0, 0.0)
    lowered = _sampler((1,), (5, 5, 5, 9), presence_penalty=1.5).process(row, 4)
    assert (lowered[5], lowered[9], lowered[1]) == (-1.5, -1.5, 0.0)
    assert not row.any(), "the given row is left alone"


def test_repetition_divides_positive_and_multiplies_negative_logits_once_a_token() -> None:
    row = torch.zeros(VOCAB)
    row[5], row[9], row[1], row[2] = 2.6, -1.0, 1.3, 4.0
    got = _sampler((1, 1), (5, 5, 5, 9), repetition_penalty=1.3).process(row, 4)
    torch.testing.assert_close(got[[5, 9, 1, 2]], torch.tensor([2.0, -1.3, 1.0, 4.0]))


def test_a_penalty_window_forgets_older_tokens() -> None:
    row = torch.ones(VOCAB)
    sampler = _sampler(
        (1, 2), (3, 3, 4), frequency_penalty=1.0, repetition_penalty=2.0, penalty_window=2
    )
    got = sampler.process(row, 3)
    assert [float(got[t]) for t in (1, 2, 3, 4)] == [1.0, 1.0, -0.5, -0.5]


@pytest.mark.parametrize("value", [None, 0.0, 1.0])
def test_neutral_penalties_leave_the_row_untouched(value: float | None) -> None:
    row = torch.randn(VOCAB)
    sampler = _sampler((1,), (2,), repetition_penalty=value)
    assert sampler.process(row, 1) is row


def test_bias_moves_single_tokens_and_ignores_ids_outside_the_vocabulary() -> None:
    sampler = _sampler(temperature=0.0, logit_bias={7: 100.0, 3: -100.0, VOCAB + 4: 100.0})
    row = torch.zeros(VOCAB)
    row[3] = 50.0
    assert sampler.draw(sampler.process(row, 0), 0) == 7


def test_min_tokens_holds_the_end_token_back() -> None:
    row = torch.zeros(VOCAB)
    row[2] = 9.0
    sampler = _sampler(stop=frozenset({2}), temperature=0.0, min_tokens=3)
    assert sampler.draw(sampler.process(row, 2), 5) != 2
    assert sampler.draw(sampler.process(row, 3), 6) == 2


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = torch.zeros(VOCAB)
    row[[11, 30, 31]] = 3.0
    outcome = sample_rows(
        torch.stack([row, row]), [_sampler(temperature=0.0)] * 2, [0, 1], [0, 0], _bytes
    )
    assert [sampled.token_id for sampled in outcome] == [11, 11]


def _naive(row: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """The filters by their definitions, on a sorted list."""
    scored = sorted(((float(v) / params.temperature, i) for i, v in enumerate(row)), reverse=True)
    if 0 < params.top_k < len(scored):
        scored = scored[: params.top_k]
    weights = [math.exp(v - scored[0][0]) for v, _ in scored]
    total = sum(weights)
    kept: dict[int, float] = {}
    mass = 0.0
    for weight, (_, token) in zip(weights, scored, strict=True):
        if 0 < params.top_p < 1 and mass >= params.top_p and kept:
            break
        kept[token] = weight
        mass += weight / total
    best = max(kept.values())
    kept = {t: w for t, w in kept.items() if w >= params.min_p * best * (1 - 1e-6)}
    total = sum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([5, 50, 900]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 3, 40, 5000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters_keep_what_their_definitions_keep(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores, ids = _candidates(row / temperature, params)
    wanted = _naive(row, params)
    got = set(ids.tolist())
    # Rounding may move a token that sits on a threshold; its weight is then that threshold's.
    assert len(got ^ set(wanted)) <= 1
    assert len(got) >= 1
    if got == set(wanted):
        probabilities = torch.softmax(scores.double(), 0)
        for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True):
            assert math.isclose(probability, wanted[token], rel_tol=1e-4)


@pytest.mark.parametrize(
    "params",
    [dict(temperature=1.0), dict(temperature=0.7, top_k=4), dict(temperature=1.0, top_p=0.7)],
)
def test_draws_follow_the_filtered_distribution(params: dict) -> None:
    row = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.5])
    wanted = _naive(row, SamplingParams(**params))
    draws = 6000
    counts: dict[int, int] = {}
    sampler = _sampler(vocab=6, seed=11, **params)
    for position in range(draws):
        token = sampler.draw(row, position)
        counts[token] = counts.get(token, 0) + 1
    assert set(counts) <= set(wanted)
    chi2 = sum((counts.get(t, 0) - draws * p) ** 2 / (draws * p) for t, p in wanted.items())
    assert chi2 < 25, counts  # 5 degrees of freedom: 1e-4


def test_a_draw_depends_on_seed_and_position_and_on_no_neighbour() -> None:
    rows = torch.randn(4, VOCAB)
    kinds = [
        dict(temperature=1.0, seed=3),
        dict(temperature=0.0),
        dict(temperature=0.8, seed=9, top_p=0.9, presence_penalty=1.0),
        dict(temperature=1.2, seed=4, top_k=5, logit_bias={2: 3.0}),
    ]

    def run(members: list[int]) -> list[int | None]:
        samplers = [
            TokenSampler(
                SamplingParams(**kinds[m]), kinds[m].get("seed", 0), [1], VOCAB, frozenset()
            )
            for m in members
        ]
        outcome = sample_rows(
            rows[members], samplers, [m + 7 for m in members], [0] * len(members), _bytes
        )
        return [sampled.token_id for sampled in outcome]

    alone = [run([m])[0] for m in range(4)]
    assert run([0, 1, 2, 3]) == alone
    assert run([3, 1]) == [alone[3], alone[1]]
    tokens = {_sampler(seed=s, temperature=1.0).draw(rows[0], 0) for s in range(40)}
    assert len(tokens) > 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_yields_no_token_and_spares_the_others(bad: float) -> None:
    rows = torch.randn(2, VOCAB)
    rows[0, 4] = bad
    samplers = [_sampler(temperature=0.0), _sampler(temperature=0.0)]
    outcome = sample_rows(rows, samplers, [0, 0], [0, 0], _bytes)
    assert outcome[0] == Sampled(None)
    assert outcome[1].token_id == int(rows[1].argmax())


def test_logprobs_are_those_of_the_unfiltered_row() -> None:
    row = torch.randn(VOCAB)
    sampler = _sampler(temperature=0.5, top_k=2, logprobs=True, top_logprobs=3)
    outcome = sample_rows(row.unsqueeze(0), [sampler], [0], [0], _bytes)[0]
    wanted = torch.log_softmax(row, 0)
    assert outcome.logprob is not None
    assert outcome.token_id is not None
    assert math.isclose(outcome.logprob.logprob, float(wanted[outcome.token_id]), abs_tol=1e-5)
    assert [t.token_id for t in outcome.logprob.top] == wanted.topk(3).indices.tolist()
    assert outcome.logprob.data == _bytes(outcome.token_id)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3),
        ("max_tokens", 0),
        ("top_logprobs", 21),
        ("seed", 2**63),
        ("temperature", True),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidField, match=field):
        SamplingParams(**{field: value}).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 1e-40, 1e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    row = torch.randn(VOCAB) * 10
    assert _sampler(temperature=temperature).draw(row, 3) == int(row.argmax())


def test_stop_ids_outside_the_vocabulary_are_no_tokens_to_hold_back() -> None:
    row = torch.zeros(VOCAB)
    sampler = _sampler(stop=frozenset({2, 99_999, -1}), temperature=0.0, min_tokens=3)
    assert float(sampler.process(row, 0)[2]) == -math.inf


class _Rule:
    def __init__(self, forced: int | None = None, banned: frozenset[int] = frozenset()) -> None:
        self.forced, self.banned = forced, banned
        self.observed: list[int] = []

    def observe(self, token_id: int) -> None:
        self.observed.append(token_id)


def test_a_rule_has_the_last_word_over_bias_penalties_and_temperature() -> None:
    row = torch.randn(VOCAB)
    params = SamplingParams(temperature=1.5, logit_bias={7: 100.0, 9: -100.0})
    forcing = TokenSampler(params, 1, [1], VOCAB, frozenset(), _Rule(forced=9))
    assert {forcing.draw(forcing.process(row, 0), p) for p in range(20)} == {9}
    banning = TokenSampler(params, 1, [1], VOCAB, frozenset(), _Rule(banned=frozenset({7})))
    assert 7 not in {banning.draw(banning.process(row, 0), p) for p in range(50)}
    greedy = TokenSampler(
        SamplingParams(temperature=0.0), 1, [1], VOCAB, frozenset(), rule := _Rule(forced=3)
    )
    (sampled,) = sample_rows(row.unsqueeze(0), [greedy], [0], [0], _bytes)
    assert sampled.token_id == 3
    greedy.commit(3)
    assert rule.observed == [3]
