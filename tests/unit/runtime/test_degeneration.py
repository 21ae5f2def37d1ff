"""The detector fires on answers that have got stuck, once, and on nothing else."""

from __future__ import annotations

import pytest

from osaurus.runtime.degeneration import DegenerationDetector


def _observe(*pieces: str) -> list[str | None]:
    detector = DegenerationDetector()
    return [detector.observe(piece) for piece in pieces]


def test_a_letter_that_does_not_end_is_found_once() -> None:
    found = _observe(*["aaaaaaaa"] * 20)
    assert found.count("repeated_character") == 1
    assert found.index("repeated_character") == 7


def test_marks_may_go_on_for_longer_than_letters() -> None:
    assert not any(_observe(*["!" * 10] * 25))
    assert any(_observe(*["!" * 10] * 26))


@pytest.mark.parametrize("length", range(3, 13))
def test_a_phrase_that_follows_on_itself_a_dozen_times_is_found(length: int) -> None:
    phrase = " ".join(f"word{i}" for i in range(length)) + " "
    assert not any(_observe(*[phrase] * 11))
    assert _observe("Well: ", *[phrase] * 12)[-1] == "repeated_phrase"


def test_pieces_may_be_cut_anywhere() -> None:
    text = "I think that " * 30
    assert "repeated_phrase" in _observe(*text)
    assert "repeated_phrase" in _observe(*[text[i : i + 7] for i in range(0, len(text), 7)])


@pytest.mark.parametrize(
    "text",
    [
        "-" * 250,
        "A" * 5000,  # one blob
        ("x" * 40 + " ") * 3,
        "!" * 100,
        "repeat this please " * 10,
        "".join(f"| {i} | {i * i} | {i % 3} |\n" for i in range(200)),
        "| --- " * 60,
        "| - " * 60 + "\n" + "+---+\n" * 40,
        " ".join(map(str, range(500))),
    ],
)
def test_what_repeats_on_purpose_is_left_alone(text: str) -> None:
    assert _observe(text) == [None]
    if "x" not in text and "A" not in text:
        assert not any(_observe(*[text[i : i + 90] for i in range(0, len(text), 90)]))


def test_white_space_ends_a_run() -> None:
    assert not any(_observe(*["aaaaaaaaaa\n"] * 11))
