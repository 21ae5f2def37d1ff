"""Where a response starts, and the ceiling on thinking."""

from __future__ import annotations

import pytest

from osaurus.parsing.budget import arm_budget
from osaurus.parsing.build import build_machine
from osaurus.parsing.reasoning import Start, start_of
from unit.parsing.transcripts import every, separate


@pytest.mark.parametrize(
    ("tail", "reasoning", "start"),
    [
        ("<|im_start|>assistant\n<think>\n", "think", Start.REASONING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "think", Start.CONTENT),
        ("<|im_start|>assistant\n", "think", Start.CONTENT),
        ("</think>x<|im_end|><|im_start|>assistant\n<think>", "think", Start.REASONING),
        ("<think>x</think><|im_start|>assistant\n", "think", Start.CONTENT),
        ("", "think", Start.CONTENT),
        ("<think>", None, Start.CONTENT),
        ("<think:opensource>", "hunyuan", Start.REASONING),
        ("<think:opensource>\n</think:opensource>", "hunyuan", Start.CONTENT),
        ("<think>\n</think:opensource>", "hunyuan", Start.CONTENT),
        ("[THINK]", "bracket", Start.REASONING),
        ("<|turn>model\n<|channel>thought\n<channel|>", "channel", Start.CONTENT),
        ("<|turn>model\n<|channel>thought\n", "channel", Start.REASONING),
        ("<|turn>model\n<|channel>thought", "channel", Start.HEADER),
        ("<|turn>model\n<|channel>", "channel", Start.HEADER),
        ("<|start|>assistant", "harmony", Start.CONTENT),
        ("<|start|>assistant<|channel|>analysis<|message|>so", "harmony", Start.REASONING),
        ("<|channel|>analysis<|message|>x<|end|><|start|>assistant", "harmony", Start.CONTENT),
        ("<|start|>assistant<|channel|>final<|message|>so", "harmony", Start.CONTENT),
    ],
)
def test_the_last_marker_of_the_prompt_decides(
    tail: str, reasoning: str | None, start: Start
) -> None:
    assert start_of(tail, reasoning) is start
    assert start_of(tail, reasoning, by_default=True) is start


def test_only_without_any_tail_the_family_s_habit_counts() -> None:
    assert start_of(None, "think", by_default=True) is Start.REASONING
    assert start_of(None, "think") is Start.CONTENT
    assert start_of(None, None, by_default=True) is Start.CONTENT


ANALYSIS = "<|channel|>analysis<|message|>hm"


@pytest.mark.parametrize(
    ("reasoning", "text"),
    [
        ("think", "<think>\nhm\n</think>\n\nok"),
        ("hunyuan", "<think:opensource>hm</think:opensource>ok"),
        ("bracket", "[THINK]hm[/THINK]ok"),
        ("channel", "<|channel>thought\nhm<channel|>ok"),
        ("harmony", ANALYSIS + "<|end|><|start|>assistant<|channel|>final<|message|>ok"),
    ],
)
def test_wherever_the_prompt_ends_in_a_block_the_rest_goes_to_the_same_rails(
    reasoning: str, text: str
) -> None:
    """What the prompt has of a response and what the model writes make one whole."""
    for place in range(len(text) + 1):
        prompt, response = text[:place], text[place:]
        # A half-written marker in the prompt is text to any reader of it.
        if any(prompt.endswith(half) for half in _halves(text)):
            continue
        machine = build_machine(
            reasoning if reasoning == "harmony" else None,
            reasoning,
            start=start_of(prompt, reasoning),
        )
        assert machine is not None
        outcome = separate(machine, every(response, 3))
        shown = (outcome.reasoning + outcome.content).strip()
        for marker in ("think", "THINK", "channel", "thought", "<", "analysis"):
            assert marker not in shown, (prompt, response)
        assert shown.endswith("ok"[max(0, place - len(text) + 2) :])


def _halves(text: str) -> set[str]:
    markers = ("<think>", "</think>", "<think:opensource>", "</think:opensource>", "[THINK]",
               "[/THINK]", "<|channel>", "<channel|>", "<|channel|>", "<|message|>", "<|end|>",
               "<|start|>assistant", "<|channel|>analysis<|message|>",
               "<|channel|>final<|message|>")  # fmt: skip
    return {marker[:n] for marker in markers if marker in text for n in range(1, len(marker))}


# -- budget

VOCABULARY = {"<think>": [7], "</think>": [8], "[THINK]": [1, 2], "[/THINK]": [3, 4]}


def encode(text: str) -> list[int]:
    return VOCABULARY.get(text, [1, 2, 3])


def decode(ids: object) -> str:
    return next((text for text, known in VOCABULARY.items() if known == ids), "?")


def test_a_budget_counts_inside_blocks_forces_the_closer_and_then_bans_reopening() -> None:
    budget = arm_budget(3, "think", start=Start.CONTENT, encode=encode, decode=decode)
    assert budget is not None
    for token in (100, 7, 101, 102):
        budget.observe(token)
        assert budget.forced is None
        assert budget.banned == frozenset()
    budget.observe(103)
    assert budget.forced == 8
    assert not budget.has_fired
    budget.observe(8)
    assert budget.forced is None
    assert budget.has_fired
    assert budget.banned == {7}
    budget.observe(104)
    assert budget.banned == {7}


def test_a_budget_counts_at_once_in_a_prefilled_block_and_over_several_blocks() -> None:
    budget = arm_budget(2, "think", start=Start.REASONING, encode=encode, decode=decode)
    assert budget is not None
    for token in (100, 8, 200, 7):
        budget.observe(token)
    assert budget.forced is None
    budget.observe(101)
    assert budget.forced == 8


def test_a_budget_that_is_not_reached_touches_nothing() -> None:
    budget = arm_budget(100, "think", start=Start.REASONING, encode=encode, decode=decode)
    assert budget is not None
    for token in (1, 2, 8, 3, 7, 4):
        budget.observe(token)
        assert (budget.forced, budget.banned, budget.has_fired) == (None, frozenset(), False)


@pytest.mark.parametrize("reasoning", ["bracket", "hunyuan_missing", "harmony", None])
def test_a_budget_is_not_armed_where_the_closer_is_not_one_token(reasoning: str | None) -> None:
    assert arm_budget(5, reasoning, start=Start.REASONING, encode=encode, decode=decode) is None
