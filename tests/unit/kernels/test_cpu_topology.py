"""Proves how many threads compute by default, on trees of files as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from osaurus.kernels import cpu_topology
from osaurus.kernels.cpu_topology import choose_threads, cpu_quota, stay_on


def _put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def _siblings(*lists: str) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text
        for cpu, text in enumerate(lists)
    }


#: Four cores of two threads each; the second threads are counted after all first ones.
_SMT = _siblings("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")
_TWO_NODES = {
    "sys/devices/system/node/node0/cpulist": "0-1,4-5",
    "sys/devices/system/node/node1/cpulist": "2-3,6-7",
}
_ALL = frozenset(range(8))


def test_siblings_of_one_core_get_one_thread(tmp_path: Path) -> None:
    choice = choose_threads(root=_put(tmp_path, _SMT), allowed=_ALL)
    assert (choice.threads, choice.cores, choice.processors) == (4, 4, 8)
    assert choice.reason == "4 physical cores of 8 processors"
    assert not choice.keep_to


def test_the_affinity_mask_counts_by_core(tmp_path: Path) -> None:
    root = _put(tmp_path, _SMT)
    assert choose_threads(root=root, allowed=frozenset({0, 4, 5})).threads == 2
    assert choose_threads(root=root, allowed=frozenset({6})).threads == 1


def test_newer_names_and_missing_files_are_understood(tmp_path: Path) -> None:
    newer = {name.replace("thread_siblings", "core_cpus"): text for name, text in _SMT.items()}
    assert choose_threads(root=_put(tmp_path / "a", newer), allowed=_ALL).threads == 4
    assert choose_threads(root=tmp_path / "nothing", allowed=_ALL).threads == 8
    broken = _siblings("0-", "one", "", "3")
    assert choose_threads(root=_put(tmp_path / "b", broken), allowed=frozenset(range(4))).cores == 4


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        # A group is bounded by those around it.
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "150000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "300000 100000",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "max 100000",
                "sys/fs/cgroup/a/b/cpu.max": "50000 100000",
            },
            0.5,
        ),
        # The host's path, or one outside the namespace: what is mounted counts.
        ({"proc/self/cgroup": "0::/../up", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/host/x", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        # Version 1, its controllers mounted together or alone, and nested.
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/a/b\n0::/",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n3:cpuset:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "20000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "10000",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "nonsense 0"}, None),
    ],
)
def test_the_tightest_quota_of_all_groups_counts(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    assert cpu_quota(_put(tmp_path, files)) == quota


@pytest.mark.parametrize(("microseconds", "threads"), [(250000, 2), (99000, 1), (900000, 4)])
def test_a_quota_is_rounded_down_and_never_raises_the_number(
    microseconds: int, threads: int, tmp_path: Path
) -> None:
    quota = {"sys/fs/cgroup/cpu.max": f"{microseconds} 100000"}
    choice = choose_threads(root=_put(tmp_path, _SMT | quota), allowed=_ALL)
    assert choice.threads == threads
    assert ("quota" in choice.reason) == (threads < 4)


def test_threads_stay_on_the_node_with_the_most_cores(tmp_path: Path) -> None:
    root = _put(tmp_path, _SMT | _TWO_NODES)
    choice = choose_threads(root=root, allowed=_ALL)
    assert (choice.threads, choice.keep_to) == (2, frozenset({0, 1, 4, 5}))
    assert choice.reason == "2 physical cores of one of 2 memory nodes"
    choice = choose_threads(root=root, allowed=frozenset({1, 2, 3, 7}))
    assert (choice.threads, choice.keep_to) == (2, frozenset({2, 3, 7}))
    only = choose_threads(root=root, allowed=frozenset({2, 3}))
    assert (only.threads, only.keep_to) == (2, frozenset())


def test_the_users_number_counts_up_to_the_processors(tmp_path: Path) -> None:
    root = _put(tmp_path, _SMT | _TWO_NODES | {"sys/fs/cgroup/cpu.max": "100000 100000"})
    choice = choose_threads(6, root=root, allowed=_ALL)
    assert (choice.threads, choice.reason, choice.keep_to) == (6, "as set", frozenset())
    choice = choose_threads(99, root=root, allowed=_ALL)
    assert choice.threads == 8
    assert choice.reason == "99 are set, and there are 8 processors"


def test_without_linux_files_the_systems_count_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cpu_topology, "_physical_cores", lambda _: 5)
    choice = choose_threads(root=tmp_path, allowed=frozenset())
    assert (choice.threads, choice.processors) == (5, 8)


def test_this_machine_gives_a_number_that_it_has() -> None:
    choice = choose_threads()
    assert 1 <= choice.threads <= choice.cores <= choice.processors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_only_the_calling_thread_is_kept_to_its_processors() -> None:
    import threading

    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    def run() -> None:
        stay_on(frozenset({min(before)}))
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [{min(before)}]
    assert os.sched_getaffinity(0) == before
