"""Claims: a grammar decides for its own row and for no other; whatever else the request asks
for works inside what the grammar allows; the answer ends where the grammar does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from osaurus.engine.sampler import Sampled, TokenSampler, sample_rows
from osaurus.grammar.mask import allows
from osaurus.grammar.matcher import GrammarFault
from osaurus.kernels.token_mask import (
    _on_device,
    best_allowed,
    keep_allowed,
)
from osaurus.parsing.budget import ThinkingBudget
from osaurus.types.sampling import SamplingParams

VOCAB = 100
END = 7


def _packed(allowed: Sequence[int], words: int = 4) -> Any:
    row = np.zeros(words, dtype=np.uint32)
    for token in allowed:
        row[token >> 5] |= np.uint32(1 << (token & 31))
    return row.view(np.int32)


class FixedGrammar:
    """Allows the same tokens always."""

    end_token_ids = frozenset({END})
    is_finished = False

    def __init__(self, allowed: Sequence[int], *, accepting: bool = False, words: int = 4) -> None:
        self.row = _packed(allowed, words)
        self.is_accepting = accepting
        self.committed: list[int] = []

    def masks(self, drafts: Sequence[int]) -> Any:
        return self.row[None]

    def commit(self, token_id: int) -> None:
        self.committed.append(token_id)

    def rollback(self, count: int) -> None:
        del self.committed[-count:]


class BrokenGrammar(FixedGrammar):
    def masks(self, drafts: Sequence[int]) -> Any:
        raise GrammarFault("too large")


def _sampler(grammar: Any = None, rule: Any = None, stop: Any = (END,), **params: Any) -> Any:
    params = {"temperature": 0.0, **params}
    return TokenSampler(SamplingParams(**params), 1, (), VOCAB, frozenset(stop), rule, grammar)


def _rows(samplers: Sequence[TokenSampler], logits: torch.Tensor, num: int = 0) -> list[Sampled]:
    return sample_rows(
        logits, samplers, [5] * len(samplers), [num] * len(samplers), lambda token: b"x"
    )


def _one(sampler: TokenSampler, logits: torch.Tensor, num: int = 0) -> int | None:
    (sampled,) = _rows([sampler], logits[None], num)
    return sampled.token_id


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 128, 200])
@pytest.mark.parametrize("density", [0.02, 0.5, 0.98])
def test_packed_masks_are_read_alike_on_host_and_device(vocab: int, density: float) -> None:
    generator = np.random.default_rng(vocab)
    flags = (generator.random(128) < density).astype(np.uint8)
    mask = np.packbits(flags, bitorder="little").view(np.int32)
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    kept = flags[:vocab].astype(bool)
    kept = np.concatenate([kept, np.zeros(max(0, vocab - 128), dtype=bool)])
    want = torch.where(torch.from_numpy(kept), row, float("-inf"))
    before = row.clone()
    assert torch.equal(_on_device(row, mask), want)
    assert torch.equal(keep_allowed(row, mask), want)
    assert torch.equal(row, before), "the given row is left alone"
    if kept.any():
        assert best_allowed(row, mask) == int(want.argmax())
    assert [allows(mask, token) for token in range(vocab)] == kept.tolist()


def test_equal_logits_go_to_the_lowest_allowed_token() -> None:
    logits = torch.zeros(VOCAB)
    assert _one(_sampler(FixedGrammar([5, 9, 60])), logits) == 5
    assert _one(_sampler(FixedGrammar(range(20, 100))), logits) == 20


def test_only_allowed_tokens_are_chosen_with_any_sampling() -> None:
    generator = torch.Generator().manual_seed(3)
    for seed in range(40):
        logits = torch.randn(VOCAB, generator=generator) * 5
        for params in ({}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 1}):
            sampler = _sampler(FixedGrammar([3, 64, 99]), **params)
            assert _one(sampler, logits) in (3, 64, 99), (seed, params)
    bias = {50: 100.0, 64: -100.0}
    assert _one(_sampler(FixedGrammar([3, 64]), logit_bias=bias), torch.zeros(VOCAB)) == 3


def test_a_row_is_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, VOCAB, generator=generator) * 3

    def samplers() -> list[TokenSampler]:
        return [
            _sampler(FixedGrammar([1, 2, 3])),
            _sampler(),
            _sampler(FixedGrammar(range(10, 60)), temperature=1.0),
            _sampler(temperature=1.0, top_p=0.8),
            _sampler(FixedGrammar([4, 90]), logit_bias={4: 1.0}),
            _sampler(frequency_penalty=1.0),
        ]

    together = [each.token_id for each in _rows(samplers(), logits)]
    alone = [_one(sampler, row) for sampler, row in zip(samplers(), logits, strict=True)]
    assert together == alone
    assert together[1] == int(logits[1].argmax())


def test_a_grammar_that_fails_ends_its_own_row_only() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 20] = 1.0
    broken, good, free = _rows(
        [_sampler(BrokenGrammar([1])), _sampler(FixedGrammar([5, 6])), _sampler()], logits
    )
    assert broken.token_id is None
    assert isinstance(broken.fault, GrammarFault)
    assert (good.token_id, free.token_id) == (5, 20)


def test_a_mask_without_any_token_of_the_model_is_a_fault() -> None:
    (sampled,) = _rows([_sampler(FixedGrammar([127]))], torch.zeros(1, VOCAB))
    assert sampled.token_id is None
    assert sampled.fault is not None


def test_a_vocabulary_larger_than_the_mask_allows_nothing_beyond_it() -> None:
    logits = torch.zeros(VOCAB)
    logits[99] = 9.0
    assert _one(_sampler(FixedGrammar([1, 2], words=1)), logits) == 1


def test_min_tokens_and_ignore_eos_bend_where_only_the_end_is_left() -> None:
    logits = torch.zeros(VOCAB)
    logits[END] = 9.0
    either, only = FixedGrammar([END, 3], accepting=True), FixedGrammar([END], accepting=True)
    assert _one(_sampler(either), logits) == END
    assert _one(_sampler(either, min_tokens=2), logits, num=1) == 3
    assert _one(_sampler(either, min_tokens=2), logits, num=2) == END
    assert _one(_sampler(only, min_tokens=2), logits) == END
    assert _one(_sampler(either, ignore_eos=True, stop=()), logits) == 3
    assert _one(_sampler(only, ignore_eos=True, stop=()), logits) == END


def test_a_stop_token_of_the_request_counts_only_where_the_grammar_accepts() -> None:
    logits = torch.zeros(VOCAB)
    logits[40] = 9.0
    stop = (END, 40)
    assert _one(_sampler(FixedGrammar([40, 41]), stop=stop), logits) == 41
    assert _one(_sampler(FixedGrammar([40, 41], accepting=True), stop=stop), logits) == 40


def test_a_thinking_budget_acts_inside_the_grammar_and_never_against_it() -> None:
    def spent(opener: int, closer: int) -> ThinkingBudget:
        return ThinkingBudget(0, openers=frozenset({opener}), closers=[closer], inside=True)

    logits = torch.zeros(VOCAB)
    logits[50] = 5.0
    assert _one(_sampler(FixedGrammar([50, 60]), rule=spent(10, 60)), logits) == 60
    assert _one(_sampler(FixedGrammar([50, 61]), rule=spent(10, 60)), logits) == 50
    closed = spent(50, 60)
    closed.observe(60)
    assert _one(_sampler(FixedGrammar([50, 61]), rule=closed), logits) == 61
    assert _one(_sampler(FixedGrammar([50]), rule=closed), logits) == 50


def test_logprobs_are_of_the_whole_distribution_as_without_a_grammar() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    (sampled,) = _rows([_sampler(FixedGrammar([3]), logprobs=True, top_logprobs=2)], logits)
    assert sampled.logprob is not None
    want = float(logits[0, 3] - torch.logsumexp(logits[0], 0))
    assert sampled.logprob.logprob == pytest.approx(want, abs=1e-5)
    assert sampled.logprob.top[0].token_id == int(logits.argmax())
