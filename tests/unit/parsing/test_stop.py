"""The stop matcher's promise: what one character at a time would find, at any chunking."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence

import pytest

from osaurus.parsing.stop import StopMatcher


def run(stops: Sequence[str], pieces: Iterable[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece) for piece in pieces)
    return out + matcher.flush(), matcher.matched


def brute_force(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """Smallest end; of those the smallest start."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "visible", "matched"),
    [
        ([" G", "ue", "st", "!"], ["\n", "Guest:"], " Guest!", None),
        (["The", " end", "<|"], ["<|end|>"], "The end<|", None),
        (["ab", "ab", "abc"], ["ababc"], "ab", "ababc"),
        (["x", "STOPy"], ["STOP"], "x", "STOP"),
        (["foo E", "ND bar HA", "LT"], ["HALT", "END"], "foo ", "END"),
        (["n", "é", "e"], ["é"], "n", "é"),
        (["STOP"], ["STOP"], "", "STOP"),
        (["a", "b", "c"], ["zzz"], "abc", None),
    ],
)
def test_near_misses_of_stop_strings(
    pieces: list[str], stops: list[str], visible: str, matched: str | None
) -> None:
    assert run(stops, pieces) == (visible, matched)
    assert run(stops, "".join(pieces)) == (visible, matched)


def test_the_match_that_ends_first_wins_over_the_one_that_starts_first() -> None:
    for pieces in (["abcdef"], list("abcdef"), ["abc", "def"]):
        assert run(["abcdef", "cd"], pieces) == ("ab", "cd")


def test_of_matches_that_end_together_the_longest_wins() -> None:
    assert run(["c", "bc", "abc"], ["xabc"]) == ("x", "abc")


def test_empty_stops_are_ignored_and_no_stop_passes_text_through() -> None:
    matcher = StopMatcher(["", ""])
    assert not matcher.is_enabled
    assert matcher.push("anything") == "anything"


def test_only_what_can_begin_a_stop_is_held() -> None:
    matcher = StopMatcher(["Guest:"])
    assert matcher.push("a G") == "a "
    assert matcher.push("u") == ""
    assert matcher.push("m") == "Gum"


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("aSTOPb") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_a_flush_releases_the_hold_and_forgets_it() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("xST") == "x"
    assert matcher.flush() == "ST"
    assert matcher.push("OP") == "OP"


def test_it_equals_the_definition_on_random_text_and_random_cuts() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(3000):
        alphabet = "ab" if rng.random() < 0.7 else "abé]^-\\"
        stops = ["".join(rng.choices(alphabet, k=rng.randrange(0, 6))) for _ in range(4)]
        text = "".join(rng.choices(alphabet + "x", k=rng.randrange(0, 25)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        wanted = brute_force(stops, text)
        assert run(stops, pieces) == wanted, f"seed {seed}: {stops} {pieces}"
        assert run(stops, text) == wanted, f"seed {seed}: {stops} {text!r}"


def test_sent_text_is_always_a_beginning_of_the_visible_text() -> None:
    text, stops = "abababababc and ababc", ["ababc", "and"]
    visible, _ = run(stops, [text])
    matcher = StopMatcher(stops)
    sent = ""
    for char in text:
        sent += matcher.push(char)
        assert visible.startswith(sent)


def test_many_long_stops_cost_linear_time() -> None:
    stops = ["a" * 2000 + chr(0x4E00 + i) for i in range(100)]
    start = time.perf_counter()
    matcher = StopMatcher(stops)
    sent = sum(len(matcher.push("a" * 7)) for _ in range(20_000))
    assert sent == 140_000 - 2000
    assert time.perf_counter() - start < 5.0
