"""Several models on one machine: who makes room for whom, and what nobody may lose. Deterministic:
the test ends every blocking call and moves the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest

from osaurus.errors import BundleError, LoadRefused
from osaurus.runtime.held import HeldModel
from osaurus.types.runtime import LoadIntent, ModelUse, ResidencyPolicy, RuntimeSettings, UseSource
from unit.runtime.world import World, WorldEngine

MULTI = RuntimeSettings(eviction="manual_multi_model")


class House(World):
    """A world whose blocking calls end at once, unless a test holds them up."""

    def go(self) -> None:
        """Until nothing moves any more."""
        for _ in range(60):
            while not self.holds_calls and self.run.calls:
                self.run.end()
            self.loop.turn()

    holds_calls = False

    def ask(
        self,
        name: str,
        intent: LoadIntent = "interactive",
        source: UseSource = "http_api",
        preserves_owner: bool = False,
    ) -> asyncio.Task[HeldModel]:
        use = ModelUse(source=source, intent=intent, preserves_owner=preserves_owner)
        task = self.loop.create_task(self.runtime.acquire(name, use=use))
        self.go()
        return task

    def hold(self, name: str, **fields: str) -> HeldModel:
        return self.ask(name, **fields).result()  # type: ignore[arg-type]

    def drop(self, held: HeldModel) -> None:
        self._within(held.release)
        self.go()

    def visit(self, name: str, **fields: str) -> None:
        self.drop(self.hold(name, **fields))

    def set(self, settings: RuntimeSettings) -> None:
        self._within(lambda: self.runtime.apply(settings))

    @property
    def resident(self) -> list[str]:
        return sorted(row.model.model_id for row in self.runtime.resident())

    @property
    def freed(self) -> list[str]:
        return [c.model_id for c in self.containers if c.is_freed]


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.holds_calls = False
    house.check()
    house.go()
    house.close()


def _engine(held: HeldModel) -> WorldEngine:
    return cast(WorldEngine, held.model.engine)


def test_strict_waits_for_the_stream_of_the_other_model(house: House) -> None:
    first = house.hold("a")
    second = house.ask("b")
    house.loop.advance(200)
    house.go()
    assert not second.done()
    assert not _engine(first).is_shut_down
    house.drop(first)
    assert second.done()
    assert house.resident == ["b"]
    assert house.freed == ["a"]
    house.drop(second.result())


def test_strict_keeps_a_model_for_vectors_beside_the_one_for_text(house: House) -> None:
    house.embedders = {"b", "c"}
    house.visit("a")
    house.visit("b")
    assert house.resident == ["a", "b"]
    house.visit("a")
    house.visit("b")
    assert house.freed == []
    house.visit("c")
    assert house.resident == ["a", "c"]
    assert house.freed == ["b"]


def test_a_stream_that_does_not_end_is_ended_but_its_memory_waits_for_it(house: House) -> None:
    first = house.hold("a")
    second = house.ask("b")
    house.loop.advance(299)
    house.go()
    assert not _engine(first).is_shut_down
    house.loop.advance(2)
    house.go()
    assert _engine(first).is_shut_down
    assert house.freed == []
    assert not second.done()
    house.drop(first)
    assert house.freed == ["a"]
    house.drop(second.result())


def test_a_request_for_the_model_that_is_leaving_waits_its_turn_and_gets_a_fresh_one(
    house: House,
) -> None:
    first = house.hold("a")
    second = house.ask("b")
    third = house.ask("a")
    house.drop(first)
    assert second.done()
    assert not third.done()
    house.drop(second.result())
    assert third.done()
    assert _engine(third.result()) is not _engine(first)
    house.drop(third.result())


def test_loads_take_turns_in_the_order_of_asking_and_everyone_gets_his_model(
    house: House,
) -> None:
    tasks = {name: house.ask(name) for name in ("c", "a", "b")}
    order: list[str] = []
    while len(order) < 3:
        (done,) = [name for name in tasks if tasks[name].done() and name not in order]
        order.append(done)
        house.drop(tasks[done].result())
    assert order == ["c", "a", "b"]


def test_manual_keeps_models_side_by_side_and_evicts_the_largest_when_it_must(
    house: House,
) -> None:
    house.set(MULTI)
    house.visit("a")  # 10 of the 40 that may be used
    house.visit("b")  # 20
    assert house.resident == ["a", "b"]
    house.visit("c")  # 30
    assert house.resident == ["a", "c"]
    assert house.freed == ["b"]


def test_bytes_are_reserved_before_anything_else_can_happen(house: House) -> None:
    house.set(MULTI)
    house.holds_calls = True
    task = house.ask("b")
    house.run.end()  # the search on disk
    house.go()
    house.run.end()  # the look at its files
    house.go()
    assert house.runtime.inflight_load_bytes == 20
    assert house.runtime.loading() == ["b"]
    house.holds_calls = False
    house.go()
    assert house.runtime.inflight_load_bytes == 0
    house.drop(task.result())
    house.fail_next_load("a")
    with pytest.raises(BundleError):
        house.ask("a").result()
    assert house.runtime.inflight_load_bytes == 0


def test_what_a_model_will_take_is_reserved_and_not_only_what_is_stored(house: House) -> None:
    house.set(MULTI)
    house.visit("a")  # 10 of the 40 that may be used
    house.footprints["b"] = 35  # 20 of weights
    house.holds_calls = True
    task = house.ask("b")
    for _ in ("the search on disk", "the look at its files", "the estimate"):
        house.run.end()
        house.go()
    assert house.runtime.inflight_load_bytes == 35
    house.holds_calls = False
    house.go()
    assert house.freed == ["a"]
    house.drop(task.result())
    house.footprints.clear()
    house.visit("a")  # what is loaded counts in the same way
    assert house.resident == ["a"]


def test_a_background_load_disturbs_nobody(house: House) -> None:
    house.visit("a")
    with pytest.raises(LoadRefused, match="a would have to go"):
        house.ask("b", "background").result()
    assert house.resident == ["a"]
    house.visit("a", intent="background")
    assert house.runtime.failures() == {}


def test_a_background_use_waits_for_live_chats_but_not_for_ever(house: House) -> None:
    chat = house.hold("a")
    assert house.runtime.chats.count == 1
    patient = house.ask("a", "background")
    assert not patient.done()
    house.drop(chat)
    assert patient.done()
    house.drop(patient.result())
    chat = house.hold("a")
    hurried = house.ask("a", "background")
    house.loop.advance(30)
    with pytest.raises(LoadRefused, match="chats are live"):
        hurried.result()
    house.drop(chat)


def test_a_load_that_its_only_caller_left_leaves_nothing(house: House) -> None:
    house.holds_calls = True
    task = house.ask("a")
    for _ in range(2):
        house.run.end()
        house.go()
    task.cancel()
    house.holds_calls = False
    house.go()
    assert house.resident == []
    assert house.freed == ["a"] * len(house.containers)
    assert house.runtime.lease.snapshot() == {}


def test_a_caller_that_comes_back_in_time_takes_over_the_load(house: House) -> None:
    house.holds_calls = True
    task = house.ask("a")
    while not house.containers:
        house.run.end()
        house.go()
    task.cancel()
    house.go()
    again = house.ask("a")
    house.holds_calls = False
    house.go()
    assert len(house.containers) == 1
    house.drop(again.result())
    assert house.resident == ["a"]


def test_another_batch_size_reaches_the_engine_with_the_next_request(house: House) -> None:
    house.visit("a")
    house.set(RuntimeSettings(max_concurrent_sequences=7))
    held = house.hold("a")
    assert held.model.engine.capacity_snapshot().configured_maximum == 7
    assert len(house.containers) == 1
    house.drop(held)


def test_a_dead_engine_is_rebuilt_on_its_weights(house: House) -> None:
    house.visit("a")
    house.kill_engine(0)
    held = house.hold("a")
    assert not _engine(held).is_shut_down
    assert len(house.containers) == 1
    assert len(house.containers[0].engines) == 2
    assert house.runtime.engines.last_error == "a: the device is gone"
    house.drop(held)


def test_weights_that_no_engine_can_be_built_on_are_loaded_anew(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.visit("a")
    house.kill_engine(0)
    make, faults = house._make_engine, [RuntimeError("CUDA error: unspecified launch failure")]

    def fail_once(container: object, size: int) -> object:
        if faults:
            raise faults.pop()
        return make(container, size)  # type: ignore[arg-type]

    monkeypatch.setattr(house, "_make_engine", fail_once)
    held = house.hold("a")
    assert len(house.containers) == 2
    assert house.containers[0].is_freed
    house.drop(held)


def test_idle_models_go_by_the_policy_that_holds_when_it_changes(house: House) -> None:
    house.visit("a")
    house.loop.advance(600)
    (row,) = house.runtime.resident()
    assert row.unload_in_s == pytest.approx(300)
    house.set(RuntimeSettings(residency=ResidencyPolicy(seconds=700)))
    house.loop.advance(99)
    house.go()
    assert house.resident == ["a"]
    house.loop.advance(1)
    house.go()
    assert house.resident == []


def test_a_model_in_use_has_no_time_to_go(house: House) -> None:
    held = house.hold("a")
    house.loop.advance(10_000)
    house.go()
    (row,) = house.runtime.resident()
    assert (row.unload_in_s, row.num_leases) == (None, 1)
    house.drop(held)
    (row,) = house.runtime.resident()
    assert row.unload_in_s == 900


def test_one_model_may_be_kept_longer_than_the_others_until_it_is_unloaded(house: House) -> None:
    house.visit("a")
    house._within(lambda: house.runtime.keep_resident("a", ResidencyPolicy(mode="never")))
    house.loop.advance(5000)
    house.visit("a")
    house.loop.advance(5000)
    house.go()
    assert house.resident == ["a"]
    house.loop.create_task(house.runtime.unload("a"))
    house.go()
    house.visit("a")
    house.loop.advance(900)
    house.go()
    assert house.resident == []


def test_an_errand_leaves_a_model_to_its_owner_and_a_request_claims_it(house: House) -> None:
    house.visit("a", source="chat_ui")
    errand = house.ask("a", source="http_api", preserves_owner=True)
    house.drop(errand.result())
    (row,) = house.runtime.resident()
    assert row.owner == "chat_ui"
    house.visit("a", source="http_api")
    (row,) = house.runtime.resident()
    assert row.owner == "http_api"


def test_an_owner_that_goes_takes_only_its_own_models_along(house: House) -> None:
    house.set(MULTI)
    house.visit("a", source="chat_ui")
    house.visit("b", source="http_api")
    house._within(lambda: house.runtime.release_owned("chat_ui", 5))
    house.loop.advance(5)
    house.go()
    assert house.resident == ["b"]


def test_what_is_kept_or_used_survives_a_clean_up(house: House) -> None:
    house.set(MULTI)
    house.memory_limit = 1000
    house.visit("a")
    held = house.hold("b")
    house.loop.create_task(house.runtime.unload_not_in(["a"]))
    house.go()
    assert house.resident == ["a", "b"]
    house.loop.create_task(house.runtime.unload_not_in([]))
    house.go()
    assert house.resident == ["b"]
    house.drop(held)


def test_clearing_all_lets_streams_end_and_gives_waiting_callers_a_fresh_load(
    house: House,
) -> None:
    held = house.hold("a")
    clearing = house.loop.create_task(house.runtime.clear_all())
    house.go()
    again = house.ask("a")
    assert not clearing.done()
    assert not _engine(held).is_shut_down
    house.drop(held)
    assert clearing.done()
    assert _engine(again.result()).container is house.containers[1]
    house.drop(again.result())
