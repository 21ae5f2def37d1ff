"""Claim: a bound on thinking closes the block at that token, once, for its own choice only."""

from __future__ import annotations

from pathlib import Path

import pytest

from osaurus.engine.core import BatchEngine
from osaurus.parsing.budget import ThinkingBudget
from osaurus.types.engine import GenerationRequest
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

OPENER, CLOSER = 301, 302
PROMPT = list(range(3, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "llama")
    return path


def _budgeted(request: GenerationRequest, budgets: list[ThinkingBudget]) -> GenerationRequest:
    return GenerationRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        params=request.params,
        make_output=request.make_output,
        n=request.n,
        make_rule=iter(budgets).__next__,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_closer_comes_at_the_bound_and_no_block_is_opened_again(
    folder: Path, temperature: float
) -> None:
    engine = BatchEngine(load_tiny(folder), token_bytes=TokenText().token_bytes)
    # The model is pushed towards opening blocks and away from closing them.
    params = dict(
        temperature=temperature, seed=5, max_tokens=20, logit_bias={OPENER: 30.0, CLOSER: -100.0}
    )
    budgets = [
        ThinkingBudget(4, openers=frozenset({OPENER}), closers=(CLOSER,), inside=inside)
        for inside in (True, False)
    ]
    (plain,) = engine.generate(ask("plain", PROMPT, **params))
    streams = engine.generate(_budgeted(ask("r", PROMPT, n=2, **params), budgets))
    inside, outside = (tokens_of(list(stream)) for stream in streams)
    assert inside.index(CLOSER) == 4
    assert inside.count(CLOSER) == 1
    assert OPENER not in inside[5:]
    # Opened by the model's own first token: four more, then the closer.
    assert outside[0] == OPENER
    assert outside.index(CLOSER) == 5
    assert OPENER not in outside[6:]
    assert all(budget.has_fired for budget in budgets)
    events = list(plain)
    assert CLOSER not in tokens_of(events)
    assert info_of(events).generated_tokens == 20
    engine.shutdown()
