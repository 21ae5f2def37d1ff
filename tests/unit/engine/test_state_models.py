"""Claims, for every kind of memory: an answer does not depend on the cache, on company, on
preemption, on forks, on neighbours that fail or leave, nor on what was evicted or damaged.
State is updated in place, so each of these could fold a token in twice or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from osaurus.cache.snapshots import Snapshot
from osaurus.engine.core import BatchEngine
from osaurus.engine.request import Phase
from osaurus.errors import InsufficientResources
from osaurus.models.base import ForwardBatch, ForwardOutput
from osaurus.topology.summary import resumes_at_snapshots
from osaurus.types.cache import CacheConfig, CacheHints
from osaurus.types.engine import EngineConfig, GenerationRequest
from synthetic import FAMILIES, build
from synthetic.model import VOCAB
from tiny import TokenText, info_of, tokens_of

BLOCK = 8
POISON = VOCAB - 1
COUNT = 12

WITH_STATE = [f for f in FAMILIES if resumes_at_snapshots(build(f).layers_topology)]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_with_state = pytest.mark.parametrize("family", WITH_STATE)


def ask(request_id: str, prompt: Sequence[int], **params: Any) -> GenerationRequest:
    """A greedy request that never says `POISON`."""
    settings = {"max_tokens": COUNT, "logit_bias": {POISON: -100.0}, **params}
    return tiny.ask(request_id, prompt, **settings)


def words(count: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them `POISON`."""
    return [random.Random(f"{seed} {i}").randrange(POISON) for i in range(count)]


def engine_of(model: Any, cache: CacheConfig | None = None, **settings: Any) -> BatchEngine:
    given = {"kv_block_tokens": BLOCK, "prefill_chunk_tokens": 24, "max_batch_size": 3, **settings}
    identity = given.pop("identity", None)
    return BatchEngine(
        model,
        EngineConfig(**given, cache=cache or CacheConfig(snapshot_interval=32)),
        token_bytes=TokenText().token_bytes,
        identity=identity,
        start=False,
    )


def run(engine: BatchEngine, *streams: Any) -> list[list[Any]]:
    for _ in range(3000):
        if all(stream._mailbox.completed for stream in streams):
            break
        engine.step()
        engine.check()
    return [list(stream) for stream in streams]


def answer(engine: BatchEngine, prompt: Sequence[int], **params: Any) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt came from the cache."""
    (events,) = run(engine, *engine.generate(ask("r", prompt, **params)))
    assert info_of(events).error is None
    return tokens_of(events), info_of(events).cached_prompt_tokens


@cache
def cold(family: str, prompt: tuple[int, ...], count: int = COUNT, seed: int | None = None) -> Any:
    engine = engine_of(build(family), CacheConfig(use_paged_cache="off"))
    params = {} if seed is None else {"temperature": 1.0, "seed": seed}
    tokens, _ = answer(engine, prompt, max_tokens=count, **params)
    close(engine)
    return tokens


def close(engine: BatchEngine) -> None:
    """Nothing is held behind."""
    engine.check()
    engine.shutdown()
    engine.check()
    assert engine.pool.used_bytes == 0
    assert engine.states.slots.num_held == 0


@each_family
def test_a_prefix_is_paid_for_once(family: str) -> None:
    engine = engine_of(build(family))
    prompt = words(100)
    turns = {
        "first": (prompt, 0),
        "again": (prompt, 96),
        "longer": ([*prompt, *words(30, 1)], 96),
        "changed at its end": ([*prompt[:95], *words(8, 2)], 88),
        "changed early": ([*prompt[:40], *words(60, 3)], 32 if family in WITH_STATE else 40),
    }
    for name, (tokens, expected) in turns.items():
        got, cached = answer(engine, tokens)
        assert got == cold(family, tuple(tokens)), name
        assert cached == expected, name
    close(engine)


@each_with_state
def test_other_prompts_share_the_stable_part(family: str) -> None:
    engine = engine_of(build(family), CacheConfig(snapshot_interval=512))
    system = words(45)
    for seed, expected in ((1, 0), (2, 40), (3, 40)):
        prompt = [*system, *words(50, seed)]
        asked = replace(ask("r", prompt), cache=CacheHints(stable_tokens=len(system)))
        (events,) = run(engine, *engine.generate(asked))
        assert tokens_of(events) == cold(family, tuple(prompt))
        assert info_of(events).cached_prompt_tokens == expected
    close(engine)


@each_family
def test_company_changes_nothing(family: str) -> None:
    engine = engine_of(build(family))
    prompts = [words(n, seed) for seed, n in enumerate((40, 1, 2, 77, 9, 8, 17))]
    streams = []
    for index, prompt in enumerate(prompts):
        streams += engine.generate(ask(f"r{index}", prompt, max_tokens=6 + 3 * index))
        engine.step()
        engine.check()
    for index, events in enumerate(run(engine, *streams)):
        assert tokens_of(events) == cold(family, tuple(prompts[index]), 6 + 3 * index)
    close(engine)


@each_family
def test_equal_prompts_that_run_together_share_what_they_compute(family: str) -> None:
    engine = engine_of(build(family), prefill_chunk_tokens=32)
    prompt = words(120)
    streams = [engine.generate(ask(f"r{i}", prompt))[0] for i in range(3)]
    for events in run(engine, *streams):
        assert tokens_of(events) == cold(family, tuple(prompt))
    assert engine.stats.prefill_tokens < 1.2 * len(prompt)
    close(engine)


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
@each_family
def test_a_preempted_request_comes_back_to_the_same_tokens(family: str, steps: int) -> None:
    engine = engine_of(build(family))
    prompts = [words(60, 1), words(31, 2)]
    streams = [engine.generate(ask(f"r{i}", p))[0] for i, p in enumerate(prompts)]
    for _ in range(steps):
        engine.step()
    for request in reversed(engine.scheduler.active):
        engine.scheduler.preempt(request)
        engine.check()
    for prompt, events in zip(prompts, run(engine, *streams), strict=True):
        assert tokens_of(events) == cold(family, tuple(prompt))
    close(engine)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("state_space",)])
def test_a_pool_that_runs_dry_costs_time_only(family: str) -> None:
    model = build(family)
    probe = engine_of(model)
    blocks = 14 * sum(probe.pool.block_bytes)
    engine = engine_of(model, kv_budget_bytes=blocks + probe.states.reserved_bytes)
    close(probe)
    prompts = [words(n, seed) for seed, n in enumerate((30, 25, 41, 17))]
    engine.scheduler._likely_missing = lambda request: [0] * len(request.tables)
    streams = [engine.generate(ask(f"r{i}", p, max_tokens=40))[0] for i, p in enumerate(prompts)]
    for prompt, events in zip(prompts, run(engine, *streams), strict=True):
        assert tokens_of(events) == cold(family, tuple(prompt), 40)
    close(engine)


@pytest.mark.parametrize("paged", ["auto", "off"])
@each_family
def test_choices_fork_with_a_state_of_their_own(family: str, paged: Any) -> None:
    engine = engine_of(build(family), CacheConfig(use_paged_cache=paged))
    prompt = words(50)
    asked = ask("r", prompt, n=2, seed=40, temperature=1.0)
    results = run(engine, *engine.generate(asked))
    for index, events in enumerate(results):
        assert tokens_of(events) == cold(family, tuple(prompt), COUNT, 40 + index)
    assert engine.scheduler.forks == 1
    assert engine.stats.prefill_tokens == 49
    close(engine)


@each_with_state
def test_a_choice_that_comes_late_resumes_near_the_prompts_end(family: str) -> None:
    engine = engine_of(build(family), max_batch_size=1)
    prompt = words(50)
    asked = ask("r", prompt, n=2, seed=40, temperature=1.0)
    first, second = engine.generate(asked)
    for _ in range(8):
        engine.step()
    engine.update_max_batch_size(2)
    for index, events in enumerate(run(engine, first, second)):
        assert tokens_of(events) == cold(family, tuple(prompt), COUNT, 40 + index)
    assert (engine.scheduler.forks, engine.stats.prefill_tokens) == (0, 49 + 1)
    close(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
@each_family
def test_cancelling_gives_the_slot_back_clean(family: str, steps: int) -> None:
    engine = engine_of(build(family), max_batch_size=2)
    prompts = [words(33, 1), words(70, 2), words(21, 3)]
    kept, gone, later = (engine.generate(ask(f"r{i}", p))[0] for i, p in enumerate(prompts))
    for _ in range(steps):
        engine.step()
    gone.close()
    for prompt, events in zip((prompts[0], prompts[2]), run(engine, kept, later), strict=True):
        assert tokens_of(events) == cold(family, tuple(prompt))
    close(engine)


class Faulty:
    """A synthetic model that computes and then fails: its state has changed by then."""

    def __init__(self, family: str) -> None:
        self.inner = build(family)
        self.fail_at: Callable[[ForwardBatch], bool] = lambda batch: False
        self.spoils: int | None = None
        self.forwards = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: ForwardBatch, kv: Any) -> ForwardOutput:
        self.forwards += 1
        output = self.inner.forward(batch, kv)
        if self.fail_at(batch):
            raise RuntimeError("kernel fault")
        if self.spoils is not None and batch.state_slot is not None:
            for row in (batch.token_ids == self.spoils).nonzero().flatten().tolist():
                slot = next(s for s, end in enumerate(batch.q_start[1:]) if row < end)
                for layer in kv:
                    for array in layer.state:
                        array[int(batch.state_slot[slot])] = float("nan")
        return output


@pytest.mark.parametrize("last", [True, False], ids=["in decode", "in prefill"])
@each_family
def test_a_request_whose_forward_fails_ends_alone(family: str, last: bool) -> None:
    model = Faulty(family)
    model.fail_at = lambda batch: bool((batch.token_ids == POISON).any())
    engine = engine_of(model)
    good = [words(40, 1), words(12, 2)]
    streams = [engine.generate(ask(f"r{i}", p, max_tokens=20))[0] for i, p in enumerate(good)]
    for _ in range(5):
        engine.step()
    bad = [*words(20, 3), POISON] if last else [*words(30, 3), POISON, *words(30, 4)]
    streams += engine.generate(ask("bad", bad))
    *results, failed = run(engine, *streams)
    for prompt, events in zip(good, results, strict=True):
        assert tokens_of(events) == cold(family, tuple(prompt), 20)
    assert info_of(failed).error_code == "request_failed"
    assert not any(r.is_alone for r in engine.scheduler.active)
    close(engine)


@each_family
def test_a_fault_that_passes_costs_nobody_an_answer(family: str) -> None:
    model = Faulty(family)
    engine = engine_of(model)
    prompts = [words(40, 1), words(12, 2), words(1, 3)]
    streams = [engine.generate(ask(f"r{i}", p, max_tokens=20))[0] for i, p in enumerate(prompts)]
    while any(len(r.generated) < 5 for r in engine.scheduler.active) or not engine.scheduler.active:
        engine.step()
    once = [model.forwards + 1, model.forwards + 4]
    model.fail_at = lambda batch: model.forwards in once and len(batch.kv_len) > 1
    for prompt, events in zip(prompts, run(engine, *streams), strict=True):
        assert tokens_of(events) == cold(family, tuple(prompt), 20)
    assert engine.stats.forward_retries >= 1
    assert engine.stats.failed_requests == 0
    close(engine)


@each_with_state
def test_a_state_that_overflows_is_nobodys_to_resume(family: str) -> None:
    model = Faulty(family)
    model.spoils = POISON
    engine = engine_of(model)
    spoiled = [*words(20, 1), POISON, *words(40, 2)]
    (events,) = run(engine, *engine.generate(ask("bad", spoiled)))
    assert info_of(events).error_code == "non_finite_logits"
    assert len(engine.states.snapshots) == 0
    (events,) = run(engine, *engine.generate(ask("bad", spoiled)))
    assert info_of(events).cached_prompt_tokens == 0
    prompt = [*spoiled[:20], *words(30, 3)]
    assert answer(engine, prompt)[0] == cold(family, tuple(prompt))
    close(engine)


@pytest.mark.parametrize("entries", [0, 1, 2])
@each_with_state
def test_evicted_snapshots_cost_tokens_only(family: str, entries: int) -> None:
    config = CacheConfig(snapshot_interval=16, recurrent_entries=entries)
    engine = engine_of(build(family), config)
    prompts = [words(70, 1), words(45, 2)]
    hits = 0
    for turn in range(6):
        prompt = [*prompts[turn % 2], *words(3 * turn, 9)]
        got, cached = answer(engine, prompt)
        assert got == cold(family, tuple(prompt))
        assert len(engine.states.snapshots) <= entries
        hits += cached
    again, cached = answer(engine, prompt)
    assert again == cold(family, tuple(prompt))
    assert (cached > 0) == (entries > 0)
    close(engine)


@each_with_state
def test_snapshots_without_their_blocks_are_no_prefix(family: str) -> None:
    engine = engine_of(build(family))
    prompt = words(60)
    answer(engine, prompt)
    engine.cache.index.clear()
    got, cached = answer(engine, prompt)
    assert got == cold(family, tuple(prompt))
    assert cached == (0 if engine.pool.groups else 56)
    close(engine)


@pytest.mark.parametrize("config", ["off", "strict"])
@each_with_state
def test_a_cache_that_is_off_keeps_no_snapshot(family: str, config: str) -> None:
    settings: dict[str, Any] = {"off": {"use_paged_cache": "off"}}.get(
        config, {"memory_profile": "strict"}
    )
    engine = engine_of(build(family), CacheConfig(**settings))
    assert [answer(engine, words(60))[1] for _ in range(2)] == [0, 0]
    stats = engine.cache_stats()
    assert (stats.snapshots, stats.snapshot_bytes) == (0, 0)
    close(engine)


@each_family
def test_a_larger_batch_gets_slots_while_requests_run(family: str) -> None:
    engine = engine_of(build(family), max_batch_size=1)
    prompts = [words(30, seed) for seed in range(4)]
    streams = [engine.generate(ask(f"r{i}", p))[0] for i, p in enumerate(prompts)]
    for _ in range(4):
        engine.step()
    engine.update_max_batch_size(4)
    engine.step()
    assert len(engine.scheduler.active) == 4
    for prompt, events in zip(prompts, run(engine, *streams), strict=True):
        assert tokens_of(events) == cold(family, tuple(prompt))
    close(engine)


def test_without_memory_for_more_slots_fewer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(build("state_space"), max_batch_size=1)

    def refuse(count: int) -> None:
        raise MemoryError("no")

    monkeypatch.setattr(engine.states.slots, "grow", refuse)
    engine.update_max_batch_size(2)
    streams = [engine.generate(ask(f"r{i}", words(9, i), max_tokens=4))[0] for i in range(2)]
    engine.step()
    assert len(engine.scheduler.active) == 1
    for index, events in enumerate(run(engine, *streams)):
        assert tokens_of(events) == cold("state_space", tuple(words(9, index)), 4)
    close(engine)


@each_family
def test_one_budget_holds_slots_snapshots_and_blocks(family: str) -> None:
    engine = engine_of(build(family), kv_budget_bytes=1 << 20)
    reserved = engine.states.reserved_bytes
    assert engine.pool.budget_bytes + reserved == 1 << 20
    assert engine.cache_stats().budget_bytes == 1 << 20
    assert (reserved > 0) == (family in WITH_STATE)
    answer(engine, words(100))
    stats = engine.cache_stats()
    assert stats.snapshot_bytes <= (1 << 20) // 4
    assert stats.held_bytes == 0
    close(engine)


def test_state_that_grows_shortens_the_context_to_what_fits() -> None:
    model = build("pool")
    whole = engine_of(model)
    least = engine_of(model, kv_budget_bytes=60_000, max_batch_size=8)
    assert 100 < least.max_context_tokens < whole.max_context_tokens == 768
    prompt = words(90)
    assert answer(least, prompt)[0] == cold("pool", tuple(prompt))
    close(whole)
    close(least)
    with pytest.raises(InsufficientResources, match="raise kv_budget_bytes or lower max_batch"):
        engine_of(model, kv_budget_bytes=8_000, max_batch_size=8)


def test_what_a_model_remembers_is_in_the_stats() -> None:
    engine = engine_of(build("short_conv"))
    answer(engine, words(60))
    stats = engine.cache_stats()
    assert stats.topology == {"short_conv": 2, "full_attention": 1}
    assert stats.snapshots == 3
    assert stats.snapshot_bytes == 3 * engine.states.slots.slot_bytes
    engine.clear_cache()
    engine.step()
    assert engine.cache_stats().snapshots == 0
    close(engine)


class Lives:
    """Engines one after another over one directory."""

    def __init__(self, family: str, directory: Path, **settings: Any) -> None:
        self.model = build(family)
        self.config = CacheConfig(snapshot_interval=32, disk_dir=directory, **settings)

    def begin(self) -> BatchEngine:
        return engine_of(self.model, self.config, identity="synthetic@1")

    def fill(self, *prompts: list[int]) -> None:
        engine = self.begin()
        for prompt in prompts:
            answer(engine, prompt)
        close(engine)


@pytest.mark.parametrize("profile", ["safe_auto", "strict"])
@each_family
def test_a_restart_finds_the_prefix_on_disk(family: str, profile: Any, tmp_path: Path) -> None:
    lives = Lives(family, tmp_path, memory_profile=profile)
    prompt = words(100)
    lives.fill(prompt)
    engine = lives.begin()
    for tokens, expected in ((prompt, 96), ([*prompt[:90], *words(20, 5)], 88)):
        (stream,) = engine.generate(ask("r", tokens))
        (events,) = run(engine, stream)
        assert tokens_of(events) == cold(family, tuple(tokens))
        assert info_of(events).cached_prompt_tokens == expected
        engine.cache.index.clear()
        engine.states.snapshots.clear()
    assert info_of(events).cache_detail == "disk"
    close(engine)


def _snapshot_records(directory: Path) -> list[Path]:
    files = directory.glob("*.safetensors")
    return [path for path in files if b"osaurus-state" in path.read_bytes()]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink])
@each_with_state
def test_damaged_snapshots_cost_tokens_only(
    family: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    lives = Lives(family, tmp_path)
    prompt = words(100)
    lives.fill(prompt)
    records = _snapshot_records(tmp_path)
    assert len(records) == 4
    for path in records:
        damage(path)
    engine = lives.begin()
    got, cached = answer(engine, prompt)
    assert got == cold(family, tuple(prompt))
    assert cached == 0
    assert answer(engine, prompt)[1] == 96
    close(engine)


@each_with_state
def test_a_snapshot_that_does_not_fit_is_a_miss_with_a_count(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Snapshot.to_record

    def short(self: Snapshot) -> Any:
        return whole(replace(self, layers=self.layers[:-1] or (replace(self.layers[0], kind="x"),)))

    lives = Lives(family, tmp_path)
    prompt = words(60)
    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "to_record", short)
        lives.fill(prompt)
    engine = lives.begin()
    got, cached = answer(engine, prompt)
    assert (got, cached) == (cold(family, tuple(prompt)), 0)
    assert engine.cache_stats().restore_mismatches == 1
    close(engine)


@each_with_state
def test_blocks_that_are_gone_leave_the_prefix_before_them(family: str, tmp_path: Path) -> None:
    lives = Lives(family, tmp_path)
    prompt = words(300)
    lives.fill(prompt)
    snapshots = _snapshot_records(tmp_path)
    runs = [path for path in tmp_path.glob("*.safetensors") if path not in snapshots]
    for path in runs:
        _flip(path)
    engine = lives.begin()
    got, cached = answer(engine, prompt)
    assert got == cold(family, tuple(prompt))
    assert cached == (0 if runs else 296)
    close(engine)


@each_with_state
def test_a_prefilling_request_holds_its_slot_and_a_waiting_one_none(family: str) -> None:
    engine = engine_of(build(family), max_batch_size=1)
    streams = [engine.generate(ask(f"r{i}", words(60, i), max_tokens=2))[0] for i in range(2)]
    engine.step()
    assert [r.phase for r in engine.scheduler.active] == [Phase.PREFILL]
    assert engine.states.slots.num_held == 1
    run(engine, *streams)
    close(engine)


def test_a_snapshot_does_not_change_under_its_owner() -> None:
    engine = engine_of(build("gated_delta"))
    prompt = words(60)
    answer(engine, prompt)
    kept = dict(engine.states.snapshots._entries)
    before = {k: [a.clone() for part in s.layers for a in part.arrays] for k, s in kept.items()}
    for _ in range(3):
        answer(engine, prompt)
    for key, snapshot in kept.items():
        after = [a for part in snapshot.layers for a in part.arrays]
        assert all(torch.equal(a, b) for a, b in zip(before[key], after, strict=True))
    close(engine)
