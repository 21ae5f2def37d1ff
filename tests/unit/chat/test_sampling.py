"""Which sampling value wins, and how long an answer may become."""

import pytest

from osaurus.chat.sampling import effective_sampling, fit_to_context
from osaurus.errors import ContextLengthExceeded, InvalidField
from osaurus.types.sampling import SamplingParams


def test_the_request_outranks_the_bundle_and_the_bundle_the_engine() -> None:
    params = effective_sampling({"top_p": 0.5}, {"top_p": 0.9, "temperature": 0.1})
    assert (params.top_p, params.temperature, params.min_p) == (0.5, 0.1, SamplingParams().min_p)


def test_minus_one_switches_top_k_off() -> None:
    assert effective_sampling({"top_k": -1}, {"top_k": 20}).top_k == 0


@pytest.mark.parametrize(
    ("explicit", "field"),
    [({"temperature": -1}, "temperature"), ({"top_p": float("nan")}, "top_p"), ({"x": 1}, "x")],
)
def test_what_is_out_of_range_is_named(explicit: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        effective_sampling(explicit, {})
    assert caught.value.field == field


@pytest.mark.parametrize(("wanted", "given"), [(None, 70), (8, 8), (70, 70), (5000, 70)])
def test_an_answer_gets_what_it_asked_for_within_the_room_left(
    wanted: int | None, given: int
) -> None:
    params = fit_to_context(SamplingParams(max_tokens=wanted), 30, 100)
    assert params.max_tokens == given


@pytest.mark.parametrize(("prompt", "limit"), [(101, 100), (100, 99), (5000, 100)])
def test_a_prompt_without_room_for_an_answer_is_refused_with_both_numbers(
    prompt: int, limit: int
) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"{prompt} tokens > {limit} maximum"):
        fit_to_context(SamplingParams(), prompt, 100)
