"""Claim: a request's own wish wins, and the cap is for what is too long and does not fit."""

from __future__ import annotations

import pytest

from osaurus.cache.policy import resolve_kv_policy, resolve_load_mode
from osaurus.types.cache import CacheConfig, KVMode

TURBO = KVMode("turbo", 3, 3)


@pytest.mark.parametrize(
    ("prompt", "fits", "cap"),
    [(131072, False, None), (131073, False, 65536), (131073, True, None), (10, False, None)],
)
def test_the_cap_is_for_long_prompts_that_do_not_fit(
    prompt: int, fits: bool, cap: int | None
) -> None:
    config = CacheConfig(kv_mode=KVMode("none"))
    assert resolve_kv_policy(config, None, None, prompt, full_kv_fits=fits) == (KVMode(), cap)


def test_explicit_values_win_even_when_they_are_worse() -> None:
    config = CacheConfig(kv_mode=TURBO)
    affine = KVMode("affine", 4, 64)
    assert resolve_kv_policy(config, affine, 100, 200000, full_kv_fits=False) == (affine, 100)
    assert resolve_kv_policy(config, KVMode(), None, 5, full_kv_fits=True) == (TURBO, None)
    assert resolve_kv_policy(config, None, None, 5, full_kv_fits=True) == (TURBO, None)


def test_without_a_default_there_is_no_cap() -> None:
    config = CacheConfig(default_max_kv_size=None)
    mode, cap = resolve_kv_policy(config, None, None, 10**6, full_kv_fits=False)
    assert (mode, cap) == (KVMode("engine_selected"), None)


@pytest.mark.parametrize("text", ["turbo(3,3)", "affine(8,64)", "none", "engine_selected"])
def test_modes_are_written_as_they_are_read(text: str) -> None:
    assert str(KVMode.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["turbo", "turbo(1,3)", "affine(3,64)", "affine(4,16)", "int8", ""]
)
def test_a_mode_that_is_none_says_what_may_be_written(text: str) -> None:
    with pytest.raises(ValueError, match="kv mode"):
        KVMode.parse(text)


@pytest.mark.parametrize(
    ("name", "kinds", "mode"),
    [
        ("google/gemma-4-12b-it-qat-MXFP4@1", ["full_attention"] * 3, KVMode("turbo", 3, 3)),
        ("dealign/Gemma-4-JANG_4M@1", ["full_attention"], KVMode("turbo", 3, 3)),
        ("google/gemma-3-qat-mxfp4@1", ["full_attention", "sliding_window"], KVMode()),
        ("meta/Llama-3-mxfp4@1", ["full_attention"], KVMode()),
    ],
)
def test_turboquant_is_chosen_for_proven_bundles_only(
    name: str, kinds: list[str], mode: KVMode
) -> None:
    assert resolve_load_mode(KVMode("engine_selected"), name, kinds) == mode
    assert resolve_load_mode(KVMode("affine", 8, 64), name, kinds) == KVMode("affine", 8, 64)
