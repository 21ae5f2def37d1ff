"""Threads for blocking work, a few for each model, so that a slow one keeps nobody else waiting.

In: a model's id and a function. Out: what the function returns, awaited. A template that takes
all its time fills its own model's threads; requests to other models find theirs free.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Pool:
    threads: ThreadPoolExecutor
    num_jobs: int = 0


class ModelThreads:
    """At most `per_model` jobs of one model run at once, the others wait in order.

    A job that nobody awaits any more still counts until it ends: a thread cannot be stopped, and
    clients that go away must not make room for more. Threads of a model without jobs end. The
    lock guards the table: jobs end on their own threads.
    """

    def __init__(self, per_model: int, *, name: str) -> None:
        self._per_model = per_model
        self._name = name
        self._pools: dict[str, _Pool] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    async def run(self, model_id: str, function: Callable[..., T], *args: Any) -> T:
        """Raises what `function` raises, and `RuntimeError` after `close`."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the threads were closed")
            pool = self._pools.get(model_id)
            if pool is None:
                threads = ThreadPoolExecutor(self._per_model, thread_name_prefix=self._name)
                pool = self._pools[model_id] = _Pool(threads)
            pool.num_jobs += 1
            job = pool.threads.submit(function, *args)
        job.add_done_callback(lambda done: self._settle(model_id, done))
        return await asyncio.wrap_future(job)

    @property
    def num_models(self) -> int:
        """Models with jobs running or waiting."""
        with self._lock:
            return len(self._pools)

    def close(self) -> None:
        """Let the threads go, without waiting for jobs that run; those that wait never start."""
        with self._lock:
            self._is_closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.threads.shutdown(wait=False, cancel_futures=True)

    def _settle(self, model_id: str, job: Future[Any]) -> None:
        with self._lock:
            pool = self._pools[model_id]
            pool.num_jobs -= 1
            if not pool.num_jobs:
                del self._pools[model_id]
                pool.threads.shutdown(wait=False)
