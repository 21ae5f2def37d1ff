"""Leases: a count that never goes wrong, and waiters that wake exactly when it is zero."""

import asyncio

from osaurus.runtime.lease import ModelLease


def test_a_name_at_zero_is_absent() -> None:
    lease = ModelLease()
    lease.acquire("a")
    lease.acquire("a")
    lease.acquire("b")
    assert lease.snapshot() == {"a": 2, "b": 1}
    assert lease.active_names() == ["a", "b"]
    lease.release("a")
    lease.release("a")
    assert lease.snapshot() == {"b": 1}
    assert lease.count("a") == 0


def test_a_release_too_many_neither_goes_negative_nor_wakes_early() -> None:
    async def scenario() -> None:
        lease = ModelLease()
        lease.release("a")
        lease.acquire("a")
        assert lease.count("a") == 1
        waiter = asyncio.create_task(lease.wait_for_zero("a"))
        await asyncio.sleep(0)
        lease.release("b")
        await asyncio.sleep(0)
        assert not waiter.done()
        lease.release("a")
        assert await waiter

    asyncio.run(scenario())


def test_waiting_for_zero_looks_again_after_a_reacquire_in_the_same_turn() -> None:
    async def scenario() -> None:
        lease = ModelLease()
        lease.acquire("a")
        waiter = asyncio.create_task(lease.wait_for_zero("a"))
        await asyncio.sleep(0)
        lease.release("a")
        lease.acquire("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiter.done()
        lease.release("a")
        assert await waiter

    asyncio.run(scenario())


def test_a_timed_wait_gives_up_and_removes_only_itself() -> None:
    async def scenario() -> None:
        lease = ModelLease()
        lease.acquire("a")
        patient = asyncio.create_task(lease.wait_for_zero("a"))
        await asyncio.sleep(0)
        assert not await lease.wait_for_zero("a", 0.0)
        lease.release("a")
        assert await patient

    asyncio.run(scenario())


def test_waiters_wake_in_the_order_they_came() -> None:
    async def scenario() -> None:
        lease = ModelLease()
        lease.acquire("a")
        woken: list[int] = []

        async def wait(number: int) -> None:
            await lease.wait_for_zero("a")
            woken.append(number)

        tasks = [asyncio.create_task(wait(n)) for n in range(5)]
        await asyncio.sleep(0)
        lease.release("a")
        await asyncio.gather(*tasks)
        assert woken == [0, 1, 2, 3, 4]

    asyncio.run(scenario())


def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        lease = ModelLease()
        lease.acquire("a")
        waiter = asyncio.create_task(lease.wait_for_zero("a"))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        lease.release("a")
        assert await lease.wait_for_zero("a", 0.0)

    asyncio.run(scenario())
