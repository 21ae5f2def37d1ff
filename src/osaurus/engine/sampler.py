"""Logits to token ids, one row a request, and nothing shared between rows.

Order: repetition, presence, frequency penalties, logit bias, the request's grammar, then
temperature, top-k, top-p, min-p, then the keyed draw of `kernels.sample`. All in float32.
Temperature 0 is the largest processed logit, ties to the lowest id.

Letters: L rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osaurus.engine.constraints import masking_of
from osaurus.kernels.native import choice
from osaurus.kernels.sample import best_scores, gumbel_noise, noise_key
from osaurus.types.engine import Constraint, TokenRule
from osaurus.types.events import TokenLogprob
from osaurus.types.sampling import SamplingParams

#: Below this a temperature is 0: scores divided by it would leave float32.
LOWEST_TEMPERATURE = 1e-5

#: Top-p looks among this many best tokens first; sorting a whole vocabulary takes 3 ms.
NUCLEUS_FIRST_LOOK = 512


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's outcome. `token_id` is None when the row held a NaN or an infinity, or when its
    grammar failed, which `fault` tells."""

    token_id: int | None
    logprob: TokenLogprob | None = None
    fault: Exception | None = None


class TokenSampler:
    """One choice's sampling state: parameters, seed, and counts for penalties."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        vocab_size: int,
        stop_token_ids: frozenset[int],
        rule: TokenRule | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.rule = rule
        self.constraint = constraint
        self.seed = seed
        self._penalties = _Penalties(params, prompt, vocab_size) if params.has_penalties else None
        bias = {t: b for t, b in params.logit_bias.items() if 0 <= t < vocab_size}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        self.stop_token_ids = frozenset(t for t in stop_token_ids if 0 <= t < vocab_size)
        self._held_back = torch.tensor(sorted(self.stop_token_ids), dtype=torch.int64)

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < LOWEST_TEMPERATURE

    @property
    def filters(self) -> choice.Filters:
        params = self.params
        return choice.Filters(params.temperature, params.top_k, params.top_p, params.min_p)

    @property
    def is_plain_greedy(self) -> bool:
        """The largest logit, of those that a grammar allows."""
        return (
            self.is_greedy
            and self._penalties is None
            and (self.rule is None or self.constraint is not None)
            and self._bias.numel() == 0
            and not self.params.logprobs
            and (self.params.min_tokens == 0 or self.constraint is not None)
        )

    def commit(self, token_id: int) -> None:
        """A token became part of the answer."""
        if self._penalties is not None:
            self._penalties.commit(token_id)
        if self.rule is not None:
            self.rule.observe(token_id)
        if self.constraint is not None:
            self.constraint.commit(token_id)

    def process(self, row: Tensor, num_generated: int) -> Tensor:
        """Penalties, bias, the ban on ending too early, then the request's own rule. With a
        grammar the latter two are in its mask, which comes after.

        row: [V] float32, not mutated.
        """
        if self.constraint is not None:
            return self._adjust(row, ends_are_banned=False)
        banned = num_generated < self.params.min_tokens and self._held_back.numel() > 0
        return self._apply_rule(self._adjust(row, ends_are_banned=banned))

    def _apply_rule(self, row: Tensor) -> Tensor:
        forced = self.rule.forced if self.rule is not None else None
        if forced is not None:
            only = torch.full_like(row, float("-inf"))
            only[forced] = 0.0
            return only
        if self.rule is None or not self.rule.banned:
            return row
        return row.index_fill(
            0, torch.tensor(sorted(self.rule.banned), device=row.device), float("-inf")
        )

    def _adjust(self, row: Tensor, *, ends_are_banned: bool) -> Tensor:
        if self._penalties is None and self._bias.numel() == 0 and not ends_are_banned:
            return row
        row = row.clone()
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._bias.numel():
            row.index_add_(0, self._bias_ids.to(row.device), self._bias.to(row.device))
        if ends_are_banned:
            row.index_fill_(0, self._held_back.to(row.device), float("-inf"))
        return row

    def draw(self, row: Tensor, position: int) -> int:
        """Choose from a processed row [V] for the token at `position`."""
        if self.is_greedy:
            return int(row.argmax())
        return self._draw_among(*_candidates(row / self.params.temperature, self.params), position)

    def choose(self, row: Tensor, contenders: Sequence[int], position: int) -> int:
        """`draw`, of which the native kernels have left these tokens."""
        if len(contenders) == 1:
            return contenders[0]
        if not contenders:
            return self.draw(row, position)
        ids = torch.tensor(sorted(contenders))
        return self._draw_among(row[ids] / self.params.temperature, ids, position)

    def _draw_among(self, scores: Tensor, ids: Tensor, position: int) -> int:
        noise = gumbel_noise(self.seed, position, ids)
        return int(ids[(scores.double() + noise).argmax()])


class _Penalties:
    """Counts of the tokens that the penalties look at, kept up to date token by token."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self._params = params
        self._window = params.penalty_window
        self._tokens = list(prompt)
        self._num_prompt = len(prompt)
        self._seen = torch.zeros(vocab_size, dtype=torch.int32)
        self._generated = torch.zeros(vocab_size, dtype=torch.int32)
        start = 0 if self._window is None else max(0, len(prompt) - self._window)
        ids = torch.tensor(self._tokens[start:], dtype=torch.int64)
        self._seen.index_add_(0, ids, torch.ones(ids.numel(), dtype=torch.int32))

    def commit(self, token_id: int) -> None:
        self._tokens.append(token_id)
        self._seen[token_id] += 1
        self._generated[token_id] += 1
        if self._window is None:
            return
        left = len(self._tokens) - self._window - 1
        if left >= 0:
            self._seen[self._tokens[left]] -= 1
            if left >= self._num_prompt:
                self._generated[self._tokens[left]] -= 1

    def apply(self, row: Tensor) -> None:
        """Change row [V] in place."""
        params = self._params
        repetition = params.repetition_penalty
        if repetition not in (None, 0, 1):
            ids = self._seen.nonzero().squeeze(1).to(row.device)
            values = row[ids]
            row[ids] = torch.where(values < 0, values * repetition, values / repetition)
        if params.presence_penalty or params.frequency_penalty:
            ids = self._generated.nonzero().squeeze(1)
            counts = self._generated[ids].float()
            lowered = params.presence_penalty + params.frequency_penalty * counts
            row.index_add_(0, ids.to(row.device), -lowered.to(row.device))


def _candidates(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens that survive top-k, top-p and min-p: their scores and ids.

    scores: [V] float32 after temperature.
    """
    vocab = scores.numel()
    nucleus = 0 < params.top_p < 1
    if 0 < params.top_k < vocab:
        scores, ids = best_scores(scores, params.top_k)
        log_total = torch.logsumexp(scores, 0)
    else:
        log_total = torch.logsumexp(scores, 0)
        ids = torch.arange(vocab, device=scores.device)
        if nucleus:
            scores, ids = _nucleus_superset(scores, params.top_p, log_total)
    if nucleus:
        probabilities = torch.exp(scores - log_total)
        # The token that crosses the threshold is kept: its predecessors' mass is below it.
        before = probabilities.cumsum(0, dtype=torch.float64) - probabilities
        kept = max(1, int((before < params.top_p).sum()))
        scores, ids = scores[:kept], ids[:kept]
    if params.min_p > 0:
        keep = scores >= scores.max() + math.log(params.min_p)
        scores, ids = scores[keep], ids[keep]
    return scores, ids


def _nucleus_superset(scores: Tensor, top_p: float, log_total: Tensor) -> tuple[Tensor, Tensor]:
    """Descending scores and ids that surely hold the whole nucleus."""
    if scores.numel() > NUCLEUS_FIRST_LOOK:
        best, ids = best_scores(scores, NUCLEUS_FIRST_LOOK)
        if float(torch.exp(best - log_total).sum()) >= top_p:
            return best, ids
    return scores.sort(descending=True, stable=True)


def sample_rows(
    logits: Tensor,
    samplers: Sequence[TokenSampler],
    positions: Sequence[int],
    num_generated: Sequence[int],
    token_bytes: Callable[[int], bytes],
) -> list[Sampled]:
    """One token for every row. logits: [L, V] float32; row i belongs to samplers[i] and
    chooses the token at positions[i] after num_generated[i] others."""
    is_native = choice.can_choose(logits)
    best, finite = _largest(logits, is_native)
    masking = masking_of(logits.shape[-1], samplers, num_generated)
    outcome: list[Sampled | None] = []
    draws: list[_Draw] = []
    for i, sampler in enumerate(samplers):
        fault = masking.faults.get(i)
        if fault is not None or not finite[i]:
            outcome.append(Sampled(None, fault=fault))
        elif sampler.is_plain_greedy:
            # What a model likes best its grammar mostly allows.
            token = masking.best(i, logits[i]) if masking.forbids(i, best[i]) else best[i]
            outcome.append(Sampled(token))
        else:
            outcome.append(None)
            row = masking.apply(i, sampler.process(logits[i], num_generated[i]))
            draws.append(_Draw(i, sampler, row, positions[i]))
    tokens = _draw(draws, is_native)
    for one, token in zip(draws, tokens, strict=True):
        logprob = None
        if one.sampler.params.logprobs:
            top = one.sampler.params.top_logprobs
            logprob = _logprob(logits[one.index], token, top, token_bytes)
        outcome[one.index] = Sampled(token, logprob)
    return [sampled for sampled in outcome if sampled is not None]


def _largest(logits: Tensor, is_native: bool) -> tuple[list[int], list[bool]]:
    """Each row's best token, the lowest of equals, and whether the row is finite."""
    if is_native:
        return choice.largest(logits)
    return logits.argmax(dim=-1).tolist(), torch.isfinite(logits.sum(dim=-1)).tolist()


@dataclass(frozen=True, slots=True)
class _Draw:
    """A step's row that is not simply its largest logit; `row` is processed and masked."""

    index: int
    sampler: TokenSampler
    row: Tensor
    position: int


def _draw(draws: Sequence[_Draw], is_native: bool) -> list[int]:
    """The token of each."""
    if not is_native:
        return [one.sampler.draw(one.row, one.position) for one in draws]
    tokens = {
        one.index: one.sampler.draw(one.row, one.position) for one in draws if one.sampler.is_greedy
    }
    drawn = [one for one in draws if one.index not in tokens]
    if drawn:
        contenders = choice.draw(
            [one.row for one in drawn],
            [one.sampler.filters for one in drawn],
            [noise_key(one.sampler.seed, one.position) for one in drawn],
        )
        for one, left in zip(drawn, contenders, strict=True):
            tokens[one.index] = one.sampler.choose(one.row, left, one.position)
    return [tokens[one.index] for one in draws]


def _logprob(
    row: Tensor, token: int, top: int, token_bytes: Callable[[int], bytes]
) -> TokenLogprob:
    values, ids, log_total = _most_likely(row, min(top, row.numel()))

    def entry(token_id: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = token_bytes(token_id)
        return TokenLogprob(
            token_id=token_id,
            text=data.decode("utf-8", errors="replace"),
            data=data,
            logprob=value - log_total,
            top=top,
        )

    best = tuple(entry(i, v) for i, v in zip(ids, values, strict=True))
    return entry(token, float(row[token]), best)


def _most_likely(row: Tensor, count: int) -> tuple[list[float], list[int], float]:
    """The `count` largest logits of row [V], their ids, and the logarithm of the sum of all
    exponentials."""
    if choice.can_choose(row):
        found = choice.candidates(row, choice.Filters(top_k=max(1, count)))
        if found is not None:
            values, ids, log_total = found
            return values[:count].tolist(), ids[:count].tolist(), log_total
    log_total = float(torch.logsumexp(row, 0))
    if not count:
        return [], [], log_total
    values, ids = best_scores(row, count)
    return values.tolist(), ids.tolist(), log_total
