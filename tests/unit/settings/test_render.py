"""Proves that rows show what holds and who says so, and offer nothing that the model ignores."""

from __future__ import annotations

from typing import Any

import pytest

from osaurus.settings.load import Flag, resolve
from osaurus.settings.render import ModelMeta, Row, preview_command, render_settings
from osaurus.settings.schema import SETTINGS

PLAIN = ModelMeta(model_id="org/m", sampling={"temperature": 0.3}, memory="needs 1 GB", capacity=4)
POOLED = ModelMeta(model_id="org/dsv4", has_pool=True, sampling={"temperature": 1.0})


def _rows(model: ModelMeta = PLAIN, **sections: Any) -> dict[str, Row]:
    return {row.id: row for row in render_settings(resolve(sections), model)}


def test_the_capacity_is_resolved_with_its_reason() -> None:
    rows = _rows(concurrency={"maxConcurrentSequences": "auto"})
    assert (rows["concurrency"].value, rows["concurrency"].source) == ("auto: 4", "settings")
    rows = _rows(memorySafety={"mode": "balanced"})
    assert (rows["concurrency"].value, rows["concurrency"].source) == ("2", "profile")
    assert rows["concurrency"].reason == "the profile balanced"


def test_sampling_says_whose_value_holds() -> None:
    rows = _rows(generation={"topP": 0.5})
    assert (rows["temperature"].value, rows["temperature"].source) == ("0.3", "bundle")
    assert (rows["top_p"].value, rows["top_p"].source) == ("0.5", "settings")
    assert (rows["min_p"].value, rows["min_p"].source) == ("0", "engine")
    assert rows["max_tokens"].value == "the room left in the context"
    assert _rows(generation={"temperature": 0.9})["temperature"].value == "0.9"


def test_tiers_show_their_resolved_sizes() -> None:
    rows = _rows()
    assert rows["prefix_memory"].value == "15 % of the memory"
    assert rows["prefix_disk"].value == "10 % of the volume, at least 10 GB"
    rows = _rows(
        cache={"prefix": {"memoryLimitMB": 64}, "blockDisk": {"maxSizePercent": 5}},
    )
    assert (rows["prefix_memory"].value, rows["prefix_disk"].value) == (
        "64 MB",
        "5 % of the volume",
    )
    assert _rows(cache={"blockDisk": {"maxSizeGB": 3}})["prefix_disk"].value == "3 GB"
    off = _rows(cache={"prefix": {"enabled": False}})
    assert off["prefix_disk"].value == "none"
    assert off["prefix_memory"].value == "dropped when a request ends"
    strict = _rows(memorySafety={"mode": "strict"})
    assert strict["prefix_memory"].value == "dropped when a request ends"


def test_memory_and_residency_are_told() -> None:
    rows = _rows(residency={"mode": "never"})
    assert rows["memory"].value == "safe_auto; needs 1 GB"
    assert rows["residency"].value == "stays loaded"
    assert _rows()["residency"].value == "unloaded after 900 s"


def test_a_pooled_cache_locks_what_its_layers_decide() -> None:
    rows = _rows(POOLED, cache={"liveKVCodec": "affine(4,64)", "pagedKV": {"blockSize": 16}})
    assert not rows["native_cache"].enabled
    for locked in ("kv_codec", "pool_quant", "paged_block_size", "compiled_decode"):
        assert not rows[locked].enabled
        assert rows[locked].reason
    assert rows["kv_codec"].value == "as computed"
    assert rows["paged_block_size"].value == "the model's"
    loaded = ModelMeta(has_pool=True, block_tokens=256)
    assert _rows(loaded)["paged_block_size"].value == "256"
    assert rows["temperature"].source == "bundle"
    assert {"native_cache", "pool_quant"}.isdisjoint(_rows())


@pytest.mark.parametrize("model", [PLAIN, POOLED, ModelMeta()])
def test_a_row_that_is_locked_says_why(model: ModelMeta) -> None:
    rows = render_settings(resolve({}), model)
    assert len({row.id for row in rows}) == len(rows)
    assert all(row.enabled or row.reason for row in rows)


def test_the_command_line_says_the_same_and_nothing_by_default() -> None:
    assert preview_command(resolve({}), PLAIN) == ["osaurus", "serve", "org/m"]
    settings = resolve(
        {
            "network": {"port": 9, "corsOrigins": ["http://a", "http://b"], "expose": True},
            "concurrency": {"maxConcurrentSequences": "auto"},
            "cache": {
                "liveKVCodec": "turboquant",
                "turboQuantKeyBits": 3,
                "turboQuantValueBits": 4,
                "blockDisk": {"enabled": False, "directory": "/x"},
            },
            "performance": {"quantizeOnLoad": "int8"},
        }
    )
    assert preview_command(settings, PLAIN)[3:] == [
        "--port", "9", "--expose", "--cors-origin", "http://a", "--cors-origin", "http://b",
        "--max-concurrent", "auto", "--kv-mode", "turbo(3,4)", "--no-disk-cache",
        "--quantize", "int8",
    ]  # fmt: skip


def test_a_pooled_model_gets_no_flag_that_it_would_ignore() -> None:
    flags = {"cache.liveKVCodec": Flag(name="--kv-mode", value="affine(8,64)")}
    words = preview_command(resolve({}, flags=flags), POOLED)
    assert words == ["osaurus", "serve", "org/dsv4"]
    for flag in ("--kv-cache-quantization", "--enable-jit", "--is-mllm", "--speculative-model"):
        assert flag not in words


def test_every_flag_is_one_of_serve() -> None:
    from inspect import signature

    from osaurus.cli.serve import serve

    known = {f"--{name.replace('_', '-')}" for name in signature(serve).parameters}
    assert {setting.flag for setting in SETTINGS if setting.flag} <= known
