"""Claim: with one arena for all threads, what threads have freed goes back to the system when the
heap is trimmed; with arenas of their own it does not, which is why the server asks for one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from osaurus.kernels.malloc import glibc

_PROGRAM = """
import sys, threading
import psutil
from osaurus.kernels.heap import keep_heap_pages, trim_heap
from osaurus.kernels.malloc import use_one_arena

if sys.argv[1] == "one":
    use_one_arena()
keep_heap_pages()
started, go = threading.Barrier(5), threading.Barrier(5)

def work():
    blocks = [b"x" * (1 << 20) for _ in range(50)]
    started.wait()  # all at once, so that none can take over another's arena
    del blocks
    go.wait()

before = psutil.Process().memory_info().rss
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
started.wait()
go.wait()
for thread in threads:
    thread.join()
trim_heap()
print((psutil.Process().memory_info().rss - before) >> 20)
"""


def _left_mb(arenas: str) -> int:
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arenas],
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return int(done.stdout)


@pytest.mark.skipif(glibc() is None, reason="needs glibc's malloc")
def test_what_threads_freed_goes_back_when_they_share_one_arena() -> None:
    assert _left_mb("one") < 20
    assert _left_mb("many") > 60  # of 200 that were allocated
