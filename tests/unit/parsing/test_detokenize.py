"""The detokenizer's promise: the same text as decoding everything, sent early and whole."""

from __future__ import annotations

import random
import time

import pytest

from osaurus.parsing.detokenize import Detokenizer

FAMILY = "👨\u200d👩\u200d👧"


def pieces(*parts: bytes) -> list[str]:
    detokenizer = Detokenizer()
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


def test_plain_text_passes_at_once() -> None:
    assert pieces(b"Hello", b", ", b"world") == ["Hello", ", ", "world", ""]


def test_a_code_point_cut_in_two_is_sent_whole_and_once() -> None:
    assert pieces(b"n\xc3", b"\xa9e") == ["n", "ée", ""]


def test_an_incomplete_code_point_at_the_end_becomes_one_replacement_character() -> None:
    assert pieces(b"a\xf0\x9f\x98") == ["a", "�"]


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"\xe0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc3(", b"\xf0\x9fA", b"\x80a"],
)
def test_invalid_bytes_read_as_python_reads_them_whatever_the_cut(data: bytes) -> None:
    whole = data.decode("utf-8", "replace")
    assert "".join(pieces(data)) == whole
    assert "".join(pieces(*(data[i : i + 1] for i in range(len(data))))) == whole


def test_bytes_that_can_still_become_valid_are_not_replaced() -> None:
    assert pieces(b"\xf0", b"\x9f", b"\x98", b"\x80") == ["", "", "", "😀", ""]


def test_a_joiner_waits_for_what_it_joins() -> None:
    assert pieces("👨\u200d".encode(), "👩".encode()) == ["", "👨\u200d👩", ""]
    assert pieces("👨".encode(), "\u200d".encode(), b"x") == ["👨", "", "\u200dx", ""]


def test_a_joiner_with_skin_tone_holds_the_emoji_it_hangs_on() -> None:
    assert pieces("ok👩🏽\u200d".encode(), "🚀".encode()) == ["ok", "👩🏽\u200d🚀", ""]


def test_a_run_of_joiners_is_not_held_for_ever() -> None:
    detokenizer = Detokenizer()
    sent = "".join(detokenizer.push("\u200d".encode()) for _ in range(1000))
    assert len(sent) >= 990


def test_a_lone_regional_indicator_waits_for_its_partner() -> None:
    c, h = "🇨".encode(), "🇭".encode()
    assert pieces(c, h, c) == ["", "🇨🇭", "", "🇨"]
    assert pieces(b"a" + c + h + c, h + b"b") == ["a🇨🇭", "🇨🇭b", ""]
    assert pieces(c, b"x") == ["", "🇨x", ""]


def test_random_cuts_never_change_the_text_nor_show_half_a_character() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(300):
        alphabet = ["a", "é", "世", "😀", "🇨", "🇭", "\u200d", "🏽", "\ufe0f", " ", FAMILY]
        text = "".join(rng.choices(alphabet, k=rng.randrange(30)))
        data = text.encode()
        parts = []
        while data:
            cut = rng.randrange(1, 6)
            parts.append(data[:cut])
            data = data[cut:]
        out = pieces(*parts)
        assert "".join(out) == text, f"seed {seed}"
        assert not any("�" in piece for piece in out), f"seed {seed}"


def test_positions_name_the_characters_a_token_has_a_share_in() -> None:
    detokenizer = Detokenizer()
    spans = []
    for data in (b"ab", b"\xc3", b"\xa9", b"", b"c"):
        start = detokenizer.next_start
        detokenizer.push(data)
        spans.append((start, detokenizer.last_end))
    assert spans == [(0, 2), (2, 3), (2, 3), (3, 3), (3, 4)]


def test_time_is_linear_in_the_number_of_tokens() -> None:
    detokenizer = Detokenizer()
    start = time.perf_counter()
    for _ in range(200_000):
        detokenizer.push(b" word")
    assert time.perf_counter() - start < 5.0
