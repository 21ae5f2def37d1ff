"""The device gate: one owner at a time, in the order in which they asked."""

import threading

import pytest

from osaurus.runtime.gate import DeviceGate


def _wait_until_queued(gate: DeviceGate, count: int) -> None:
    turn = threading.Event()
    for _ in range(1000):
        if len(gate.waiting) >= count:
            return
        turn.wait(0.005)
    pytest.fail(f"only {gate.waiting} are waiting")


def test_owners_pass_in_the_order_in_which_they_asked() -> None:
    gate = DeviceGate()
    order: list[str] = []

    def use(owner: str) -> None:
        with gate.hold(owner):
            assert gate.owner == owner
            order.append(owner)

    threads: list[threading.Thread] = []
    with gate.hold("first"):
        for number in range(5):
            thread = threading.Thread(target=use, args=(f"gen:{number}",))
            thread.start()
            threads.append(thread)
            _wait_until_queued(gate, number + 1)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [f"gen:{number}" for number in range(5)]
    assert gate.owner is None


def test_who_releases_and_asks_again_goes_behind_who_waits() -> None:
    gate = DeviceGate()
    order: list[str] = []

    def wait_once() -> None:
        with gate.hold("waiter"):
            order.append("waiter")

    with gate.hold("busy"):
        thread = threading.Thread(target=wait_once)
        thread.start()
        _wait_until_queued(gate, 1)
    with gate.hold("busy"):
        order.append("busy")
    thread.join()
    assert order == ["waiter", "busy"]


def test_the_device_is_free_again_after_an_owner_failed() -> None:
    gate = DeviceGate()
    with pytest.raises(ZeroDivisionError), gate.hold("load"):
        _ = 1 / 0
    with gate.hold("next"):
        assert gate.owner == "next"
