"""Idle timers, on a clock that stands still: exactly when a model goes, and when it must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from osaurus.runtime.residency import ModelResidency
from osaurus.types.runtime import ResidencyPolicy
from unit.runtime.virtual import VirtualLoop

AFTER = ResidencyPolicy(seconds=900)


class House:
    """One loop, what is resident and leased there, and what was unloaded when."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.leases: dict[str, int] = {}
        self.resident = {"a", "b"}
        self.unloaded: list[tuple[str, float]] = []
        self.residency = ModelResidency(
            self._unload,
            num_leases=lambda name: self.leases.get(name, 0),
            is_resident=self.resident.__contains__,
            clock=self.loop.time,
        )
        self.start = self.loop.now

    async def _unload(self, name: str) -> None:
        self.resident.discard(name)
        self.unloaded.append((name, self.loop.now - self.start))

    def do(self, call: Callable[[], object]) -> object:
        async def run() -> object:
            return call()

        task = self.loop.create_task(run())
        self.loop.settle()
        return task.result()

    def idle(self, name: str, policy: ResidencyPolicy = AFTER) -> int:
        decision = self.do(lambda: self.residency.schedule(name, policy))
        assert isinstance(decision, int)
        return decision


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.do(house.residency.cancel_all)
    house.loop.settle()
    assert not house.loop.errors
    house.loop.close()


def test_a_model_goes_when_its_time_is_up_and_not_before(house: House) -> None:
    house.idle("a")
    house.loop.advance(899.9)
    assert house.unloaded == []
    (idle,) = house.residency.idle_models()
    assert idle.unload_in_s == pytest.approx(0.1)
    house.loop.advance(0.1)
    assert house.unloaded == [("a", 900)]
    assert house.residency.idle_models() == []


def test_immediately_is_the_next_turn_and_never_is_never(house: House) -> None:
    house.idle("a", ResidencyPolicy(mode="immediately"))
    house.idle("b", ResidencyPolicy(mode="never"))
    house.loop.advance(0)
    assert house.unloaded == [("a", 0)]
    house.loop.advance(10 * 86_400)
    assert house.unloaded == [("a", 0)]
    (idle,) = house.residency.idle_models()
    assert (idle.name, idle.unload_in_s) == ("b", None)


def test_use_in_the_meantime_starts_the_time_anew(house: House) -> None:
    house.idle("a")
    house.loop.advance(800)
    house.do(lambda: house.residency.mark_active("a"))
    house.loop.advance(800)
    house.idle("a")
    house.loop.advance(899)
    assert house.unloaded == []
    house.loop.advance(1)
    assert house.unloaded == [("a", 2500)]


def test_a_timer_that_meets_a_lease_leaves_the_model_to_its_release(house: House) -> None:
    house.idle("a")
    house.leases["a"] = 1
    house.loop.advance(5000)
    assert house.unloaded == []
    assert [idle.unload_in_s for idle in house.residency.idle_models()] == [None]
    house.leases["a"] = 0
    house.idle("a")
    house.loop.advance(900)
    assert house.unloaded == [("a", 5900)]


def test_a_model_that_went_otherwise_is_not_unloaded_again(house: House) -> None:
    house.idle("a")
    house.resident.discard("a")
    house.loop.advance(1000)
    assert house.unloaded == []
    assert house.residency.idle_models() == []


def test_an_old_decision_cannot_cancel_a_newer_one(house: House) -> None:
    old = house.idle("a")
    new = house.idle("a")
    assert not house.do(lambda: house.residency.cancel("a", old))
    assert [idle.decision for idle in house.residency.idle_models()] == [new]
    assert house.do(lambda: house.residency.cancel("a", new))
    house.loop.advance(2000)
    assert house.unloaded == []


def test_an_acceleration_only_shortens(house: House) -> None:
    house.idle("a")
    house.loop.advance(100)
    assert not house.do(lambda: house.residency.accelerate("a", 1000))
    assert house.do(lambda: house.residency.accelerate("a", 30))
    assert not house.do(lambda: house.residency.accelerate("b", 30))
    house.loop.advance(30)
    assert house.unloaded == [("a", 130)]
    house.idle("b", ResidencyPolicy(mode="never"))
    assert not house.do(lambda: house.residency.accelerate("b", 30))


def test_an_acceleration_that_is_not_wanted_any_more_gives_the_planned_time_back(
    house: House,
) -> None:
    house.idle("a")
    house.do(lambda: house.residency.accelerate("a", 30, lambda: False))
    house.loop.advance(899)
    assert house.unloaded == []
    house.loop.advance(1)
    assert house.unloaded == [("a", 900)]


def test_a_changed_policy_counts_from_when_the_model_fell_idle(house: House) -> None:
    house.idle("a")
    house.idle("b")
    house.loop.advance(100)
    house.do(lambda: house.residency.reschedule("a", ResidencyPolicy(seconds=60)))
    house.do(lambda: house.residency.reschedule("b", ResidencyPolicy(mode="never")))
    house.loop.advance(0)
    assert house.unloaded == [("a", 100)]
    house.loop.advance(5000)
    assert house.unloaded == [("a", 100)]


def test_policies_say_their_delay() -> None:
    assert ResidencyPolicy().delay_s == 900
    assert ResidencyPolicy(mode="immediately").delay_s == 0
    assert ResidencyPolicy(mode="never").delay_s is None
