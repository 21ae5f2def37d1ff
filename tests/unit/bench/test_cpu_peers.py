"""Proves the arithmetic beside the peers' figures: roofs and goals."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

_BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    return importlib.import_module("peer_roofline")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    return importlib.import_module("peer_table")


def _needs(roofline: ModuleType):
    return roofline.Needs(
        file_bytes=1000,
        body_elements=800,
        head_elements=200,
        windows=(0, 10),
        kv_width=2,
        query_width=4,
    )


def test_a_decoded_token_reads_every_weight_and_what_the_layers_still_see(roofline) -> None:
    speeds = roofline.Speeds(read_bytes_per_s=1e3, bf16_flop_per_s=1e12)
    # 4 bytes times the width times 100 tokens in the one layer and the window's 10 in the other.
    seconds = (1000 + 4 * 2 * (100 + 10)) / 1e3
    found = roofline.roof("decode at 100", "tok/s", _needs(roofline), speeds, "file")
    assert found == pytest.approx(1 / seconds)
    in_bfloat16 = roofline.roof("decode at 100", "tok/s", _needs(roofline), speeds, "bfloat16")
    assert in_bfloat16 == pytest.approx(1 / (seconds + 1))


def test_a_prompt_multiplies_the_layers_for_each_token_and_the_head_once(roofline) -> None:
    speeds = roofline.Speeds(read_bytes_per_s=1e12, bf16_flop_per_s=1e3)
    attention = 4 * 4 * 1000 * (500 + 10)
    seconds = (2 * 800 * 1000 + 2 * 200 + attention) / 1e3
    found = roofline.roof("prefill 1,000", "tok/s", _needs(roofline), speeds, "file")
    assert found == pytest.approx(1000 / seconds)
    wait = roofline.roof("first token after 1,000", "ms", _needs(roofline), speeds, "file")
    assert wait == pytest.approx(1e3 * seconds)


def test_what_bytes_and_products_do_not_bound_has_no_roof(roofline) -> None:
    speeds = roofline.Speeds(read_bytes_per_s=1e3, bf16_flop_per_s=1e3)
    for figure, unit in (("longest gap of 4 streams", "ms"), ("resident after the run", "MB")):
        assert roofline.roof(figure, unit, _needs(roofline), speeds, "file") is None


def _report(**rows: dict) -> dict:
    programs = {
        "osaurus": {"version": "1", "weights": "file"},
        "llama.cpp": {"version": "2", "weights": "file"},
    }
    return {
        "model": "m.gguf",
        "date": "2026-01-01 00:00",
        "machine": {"cpu": "a cpu"},
        "threads": 2,
        "slots": 4,
        "context": 100,
        "speeds": {"read_bytes_per_s": 1e9, "bf16_flop_per_s": 1e9},
        "programs": programs,
        "not_started": {"vLLM CPU": "it is not there"},
        "rows": {
            name.replace("_", " "): {
                "unit": "tok/s",
                "roof": {"file": 400.0, "bfloat16": None},
                "programs": found,
            }
            for name, found in rows.items()
        },
    }


def _median(value: float) -> dict:
    return {"median": value, "low": value, "high": value, "values": [value, value]}


def test_a_goal_is_reached_by_the_ratio_and_unmeasured_without_its_peer(table) -> None:
    text = table.as_markdown(
        _report(
            decode_at_64={"osaurus": _median(260), "llama.cpp": _median(200)},
            prefill_512={"osaurus": _median(900), "llama.cpp": {"not_run": "it broke"}},
        )
    )
    assert "| decode, one stream, by llama.cpp's | 1.3 | at least 1.25 | yes |" in text
    assert "| prefill 512 by vLLM CPU's | not measured | at least 1.1 | - |" in text
    assert "- vLLM CPU: not run: it is not there" in text
    assert "- llama.cpp, prefill 512: not run: it broke" in text


def test_a_short_goal_is_said_to_be_missed(table) -> None:
    text = table.as_markdown(
        _report(decode_at_64={"osaurus": _median(210), "llama.cpp": _median(200)})
    )
    assert "| decode, one stream, by llama.cpp's | 1.05 | at least 1.25 | **no** |" in text


def test_streams_have_a_goal_with_their_prompts_and_one_without(table) -> None:
    rows = {
        "8 x 64+64": {"osaurus": _median(300), "vLLM CPU": _median(200)},
        "8 x 64+64, while all decode": {"osaurus": _median(360), "vLLM CPU": _median(200)},
    }
    text = table.as_markdown(_report(**rows))
    assert "| 8 streams by vLLM CPU's, prompts included | 1.5 | at least 1.7 | **no** |" in text
    assert "| 8 streams by vLLM CPU's, while all decode | 1.8 | at least 1.7 | yes |" in text
