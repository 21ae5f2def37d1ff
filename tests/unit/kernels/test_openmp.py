"""Claim: a thread that is done computing leaves no OpenMP workers behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from osaurus.kernels import openmp


@pytest.mark.skipif(
    openmp.team_function("omp_pause_resource_all") is None, reason="torch brings no libgomp here"
)
def test_released_workers_are_gone_and_the_next_kernel_brings_them_back() -> None:
    def workers() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    counts: list[int] = []

    def compute() -> None:
        torch.set_num_threads(3)
        before = workers()
        for _ in range(2):
            torch.ones(1 << 20).exp_()
            counts.append(workers() - before)
            openmp.release_team()
            counts.append(workers() - before)

    before = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert counts == [2, 0, 2, 0]
