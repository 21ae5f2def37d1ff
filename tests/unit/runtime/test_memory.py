"""Proves what a model is said to need, what each profile allows, and that only one refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osaurus.runtime.geometry import Geometry, LayerShape, read_geometry
from osaurus.runtime.machine import Memory, host_memory
from osaurus.runtime.memory import (
    SPECULATION_FLOOR_BYTES,
    Limits,
    LoadFacts,
    allocator_cache,
    budget_of,
    estimate,
    feasibility,
    plan_load,
    resolve_capacity,
)
from osaurus.settings.capacity import Capacity
from osaurus.settings.profiles import PROFILES

GB = 10**9
HOST = Memory(name="host", physical_bytes=10 * GB, available_bytes=9 * GB)
GEOMETRY = Geometry(
    layers=(LayerShape(row_items=256),) * 4,
    hidden_size=256,
    intermediate_size=512,
    vocab_size=1000,
    context_tokens=4096,
)


def _facts(weights: float = 1.0, **changes: Any) -> LoadFacts:
    facts = LoadFacts(model_id="m", weights_bytes=int(weights * GB), geometry=GEOMETRY, capacity=2)
    return replace(facts, **changes)


def test_keys_and_values_are_a_full_batch_of_full_contexts_within_the_engines_budget() -> None:
    one = 4 * 256 * 4096 * 2
    assert estimate(_facts(), 9 * GB).kv_bytes == 2 * one
    assert estimate(_facts(capacity=5), 9 * GB).kv_bytes == 5 * one
    assert estimate(_facts(context_tokens=1024), 9 * GB).kv_bytes == 2 * one // 4
    assert estimate(_facts(kv_item_bytes=4), 9 * GB).kv_bytes == 4 * one
    assert estimate(_facts(), 16 * one // 4).kv_bytes == one
    assert estimate(_facts(kv_budget_bytes=one), 9 * GB).kv_bytes == one


def test_a_window_bounds_its_layers_and_states_have_slots_and_snapshots() -> None:
    windowed = replace(GEOMETRY, layers=(LayerShape(row_items=256, window=100),))
    assert estimate(_facts(geometry=windowed), 9 * GB).kv_bytes == 2 * 256 * 100 * 2
    stateful = replace(GEOMETRY, layers=(LayerShape(state_items=1000),))
    found = estimate(_facts(geometry=stateful, snapshots=8), 9 * GB)
    assert found.kv_bytes == 0
    assert found.state_bytes == 4000 * 2 + (4000 * 10) // 4  # snapshots take a quarter at most


def test_drafting_costs_its_floor_and_nothing_where_it_is_off() -> None:
    assert estimate(_facts(), 9 * GB).speculation_bytes == 0
    assert estimate(_facts(drafts=True), 9 * GB).speculation_bytes == SPECULATION_FLOOR_BYTES
    wide = replace(GEOMETRY, intermediate_size=10**6)
    found = estimate(_facts(drafts=True, geometry=wide), 9 * GB)
    assert found.speculation_bytes == 2 * found.activation_bytes > SPECULATION_FLOOR_BYTES


@pytest.mark.parametrize(
    ("mode", "budget"),
    [
        ("performance", 9.0),
        ("balanced", 7.5),
        ("safe_auto", 7.0),
        ("strict", 6.0),
        ("diagnostic_dangerous", None),
    ],
)
def test_each_profile_allows_its_share(mode: Any, budget: float | None) -> None:
    limits = Limits(mode=mode)
    assert budget_of(limits, 10 * GB) == (None if budget is None else int(budget * GB))
    own = replace(limits, custom_fraction=0.5)
    assert budget_of(own, 10 * GB, 6 * GB) == 5 * GB


def test_weights_that_nearly_fill_the_memory_raise_the_share_but_not_in_strict() -> None:
    safe = Limits()
    assert budget_of(safe, 10 * GB, int(5.5 * GB)) == 7 * GB
    assert budget_of(safe, 10 * GB, int(8.0 * GB)) == pytest.approx(8.6 * GB)
    assert budget_of(safe, 10 * GB, int(8.6 * GB)) == pytest.approx(9.2 * GB)
    assert budget_of(safe, 10 * GB, int(8.7 * GB)) == 7 * GB
    assert budget_of(Limits(mode="strict"), 10 * GB, 8 * GB) == 6 * GB


@pytest.mark.parametrize("mode", PROFILES)
def test_only_strict_refuses_what_does_not_fit(mode: Any) -> None:
    plan = plan_load(_facts(9.5), Limits(mode=mode), HOST)
    assert plan.allowed == (mode != "strict")
    assert bool(plan.warnings) == (mode in ("performance", "balanced", "safe_auto"))


def test_a_refusal_has_the_numbers_and_the_settings_to_change() -> None:
    (message,) = plan_load(_facts(9.5), Limits(mode="strict"), HOST).blocking
    for words in (
        "m needs about 9.6 GB on the host",
        "weights 9.5 GB",
        "memorySafety.mode strict allows 6.0 GB, 60 % of 10.0 GB",
        "performance.quantizeOnLoad",
        "customPhysicalMemoryFraction",
    ):
        assert words in message
    (message,) = plan_load(_facts(5.99), Limits(mode="strict"), HOST).blocking
    assert "performance.maxContextTokens or concurrency.maxConcurrentSequences" in message
    own = Limits(mode="strict", custom_fraction=0.1)
    assert (
        "customPhysicalMemoryFraction allows 1.0 GB" in plan_load(_facts(), own, HOST).blocking[0]
    )


def test_what_others_take_counts() -> None:
    strict = Limits(mode="strict")
    assert plan_load(_facts(4), strict, HOST).allowed
    assert not plan_load(_facts(4), strict, HOST, others_bytes=2 * GB).allowed


def test_an_unknown_size_is_refused_by_strict_and_where_the_user_says_so() -> None:
    unknown = _facts(geometry=None)
    assert plan_load(unknown, Limits(), HOST).allowed
    assert not plan_load(unknown, Limits(mode="strict"), HOST).allowed
    assert not plan_load(unknown, Limits(refuses_unknown=True), HOST).allowed
    assert estimate(unknown, 9 * GB).kv_bytes == 512 << 20
    assert estimate(_facts(10, geometry=None), 9 * GB).kv_bytes == 2 * GB


def test_host_and_device_are_judged_apart() -> None:
    strict = Limits(mode="strict")
    device = Memory(name="cuda", physical_bytes=40 * GB, available_bytes=39 * GB)
    plan = plan_load(_facts(20), strict, HOST, device)
    assert plan.allowed
    assert [one.place for one in plan.judgements] == ["cuda", "host"]
    assert plan.judgements[1].needed_bytes < 2 * GB
    assert "on the cuda" in plan.summary
    assert "on the host" in plan.summary
    small = Memory(name="host", physical_bytes=GB, available_bytes=GB)
    (message,) = plan_load(_facts(20), strict, small, device).blocking
    assert "on the host" in message
    (message,) = plan_load(_facts(30), strict, HOST, device).blocking
    assert "on the cuda" in message


def test_the_allocators_cache_never_shrinks_below_a_steps_scratch() -> None:
    plain, drafting = (estimate(_facts(drafts=drafts), 9 * GB) for drafts in (False, True))
    assert allocator_cache(Limits(mode="performance"), plain) is None
    assert allocator_cache(Limits(mode="balanced"), plain) == 1 << 30
    assert allocator_cache(Limits(), plain) == 128 << 20
    assert allocator_cache(Limits(), drafting) == drafting.scratch_bytes > 2 << 30
    assert allocator_cache(Limits(custom_allocator_cache_bytes=1), plain) == plain.scratch_bytes


def test_auto_runs_one_request_for_each_gibibyte_of_the_budget() -> None:
    auto = Capacity(requests="auto", reason="")

    def resolved(gigabytes: float, mode: Any = "safe_auto", *, is_device: bool = False) -> int:
        memory = Memory(name="x", physical_bytes=int(gigabytes * 2**30), available_bytes=0)
        return resolve_capacity(auto, Limits(mode=mode), memory, is_device=is_device)

    assert [resolved(size) for size in (0.5, 2, 4, 8, 16, 64)] == [1, 1, 2, 5, 8, 8]
    assert resolved(4, "strict") == 2
    assert resolved(4, "diagnostic_dangerous") == 4
    assert [resolved(size, is_device=True) for size in (16, 80)] == [11, 32]
    fixed = Capacity(requests=5, reason="")
    assert resolve_capacity(fixed, Limits(), HOST, is_device=False) == 5


def test_pressure_is_told_in_three_words() -> None:
    def verdict(needed: float, others: float = 0, **shares: float) -> str:
        return feasibility(
            needed_bytes=int(needed * GB), others_bytes=int(others * GB), memory=HOST, **shares
        )

    assert [verdict(size) for size in (7.9, 8.5, 9.1)] == ["ok", "tight", "refused"]
    assert verdict(4, 4.5) == "tight"
    assert verdict(8.5, soft=0.9, hard=0.8) == "tight"  # swapped
    assert verdict(9.5, soft=2.0, hard=3.0) == "tight"  # more than is available


def test_a_control_group_around_this_one_counts(tmp_path: Path) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "self"
    inner = groups / "a/b"
    inner.mkdir(parents=True)
    own.write_text("0::/a/b\n")
    assert host_memory(groups, own) == host_memory(tmp_path / "none", tmp_path / "none")
    (inner / "memory.max").write_text("max\n")
    (groups / "a/memory.max").write_text("1000000\n")
    (groups / "a/memory.current").write_text("400000\n")
    found = host_memory(groups, own)
    assert (found.physical_bytes, found.available_bytes) == (1_000_000, 600_000)
    first = groups / "memory/x"
    first.mkdir(parents=True)
    own.write_text("7:cpu:/x\n5:memory:/x\n")
    (first / "memory.limit_in_bytes").write_text("500000")
    (first / "memory.usage_in_bytes").write_text("600000")
    found = host_memory(groups, own)
    assert (found.physical_bytes, found.available_bytes) == (500_000, 0)


def test_a_config_that_does_not_tell_has_no_geometry() -> None:
    assert read_geometry({}) is None
    assert read_geometry({"num_hidden_layers": "x", "hidden_size": 3}) is None


def test_a_nested_config_and_each_way_to_name_layers_is_read() -> None:
    text = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    assert read_geometry({"text_config": text, "model_type": "x"}) == read_geometry(text)

    def windows(**fields: Any) -> list[int | None]:
        found = read_geometry({**text, **fields})
        assert found is not None
        return [layer.window for layer in found.layers]

    assert windows() == [None] * 4
    assert windows(sliding_window=8) == [8] * 4
    assert windows(sliding_window=8, use_sliding_window=False) == [None] * 4
    assert windows(sliding_window=8, sliding_window_pattern=2) == [8, None] * 2
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(sliding_window=8, layer_types=kinds) == [None, 8] * 2
