"""Claim: in every order of events nobody loses a model while using it, no model is built twice,
nothing is freed twice or left behind, and every caller gets an answer.

`world.py` says what may happen and what must hold. Hypothesis looks for short counterexamples;
the seeded walks are many and print their seed when they fail.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from osaurus.types.runtime import ResidencyPolicy
from unit.runtime.world import MODELS, World

_POLICIES = (
    ResidencyPolicy(mode="immediately"),
    ResidencyPolicy(mode="never"),
    ResidencyPolicy(seconds=30),
    ResidencyPolicy(),
)
_NAMES = st.sampled_from(MODELS)
_INDEX = st.integers(0, 7)


class RuntimeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(name=_NAMES, background=st.booleans())
    def acquire(self, name: str, background: bool) -> None:
        self.world.acquire(name, "background" if background else "interactive")

    @rule(index=_INDEX)
    def cancel(self, index: int) -> None:
        self.world.cancel(index)

    @rule(index=_INDEX)
    def release(self, index: int) -> None:
        self.world.release(index)

    @rule(index=_INDEX)
    def end_call(self, index: int) -> None:
        self.world.end_call(index)

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.world.turn()
            self.world.check()

    @rule(seconds=st.sampled_from([0.0, 1.0, 31.0, 301.0, 901.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(name=_NAMES)
    def unload(self, name: str) -> None:
        self.world.unload(name)

    @rule(name=_NAMES)
    def unload_others(self, name: str) -> None:
        self.world.unload_not_in([name])

    @rule()
    def clear_all(self) -> None:
        self.world.clear_all()

    @rule(index=_INDEX)
    def kill_engine(self, index: int) -> None:
        self.world.kill_engine(index)

    @rule(name=_NAMES)
    def fail_next_load(self, name: str) -> None:
        self.world.fail_next_load(name)

    @rule(
        is_strict=st.booleans(),
        residency=st.sampled_from(_POLICIES),
        capacity=st.sampled_from([None, 1, 4, 9]),
    )
    def configure(self, is_strict: bool, residency: ResidencyPolicy, capacity: int | None) -> None:
        self.world.configure(is_strict=is_strict, residency=residency, capacity=capacity)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.close()


TestRuntime = RuntimeMachine.TestCase
TestRuntime.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def _walk(seed: int, steps: int = 60) -> int:
    """One random order of events; returns how many callers got their model."""
    choose = random.Random(seed)
    world = World(choose)
    strict = choose.random() < 0.6
    world.configure(is_strict=strict, residency=choose.choice(_POLICIES), capacity=None)
    world._changed_policy = False
    operations = (
        [lambda: world.acquire(choose.choice(MODELS))] * 6
        + [lambda: world.acquire(choose.choice(MODELS), "background")]
        + [lambda: world.cancel(choose.randrange(8))] * 2
        + [lambda: world.release(choose.randrange(8))] * 3
        + [lambda: world.end_call(choose.randrange(8))] * 14
        + [lambda: world.turn()] * 16
        + [lambda: world.advance(choose.choice([0.0, 31.0, 301.0]))] * 3
        + [lambda: world.unload(choose.choice(MODELS))]
        + [lambda: world.kill_engine(choose.randrange(8))]
        + [lambda: world.fail_next_load(choose.choice(MODELS))]
        + [lambda: world.clear_all()] * (choose.random() < 0.3)
    )
    for _ in range(steps):
        choose.choice(operations)()
        world.check()
    world.close()
    return world.num_acquired


def _explore(seeds: range) -> None:
    acquired = 0
    for seed in seeds:
        try:
            acquired += _walk(seed)
        except AssertionError as fault:
            raise AssertionError(f"seed {seed}: {fault}") from fault
    assert acquired > len(seeds)  # they do get somewhere


def test_a_thousand_orders_of_events() -> None:
    _explore(range(1000))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_orders_of_events() -> None:
    _explore(range(1000, 11_000))
