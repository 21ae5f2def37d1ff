"""How many threads compute, and why: physical cores within this process's limits.

Affinity, cgroup quotas and NUMA nodes are read from files of Linux under a `root` that a test
may make; elsewhere the operating system's count of physical cores is all there is.

- Threads are counted by physical core: siblings share the units that a product is bound by.
- A quota of 2.5 processors is two threads: a third would be stopped in each period while the
  others wait for it.
- A step's threads read each other's results over a hundred times, so they stay on one NUMA
  node: that with the most cores of this process, the first among equals.
- A number that the user gives counts instead of all three, up to the processors there are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

#: What a cgroup of version 1 writes for "no quota", and of version 2.
_NO_QUOTA = ("-1", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadChoice:
    """`threads` compute; `reason` is why, in words. `processors` are those that this process
    may run on, `cores` theirs. The threads stay on `keep_to`, empty for anywhere."""

    threads: int
    reason: str
    processors: int
    cores: int
    keep_to: frozenset[int] = frozenset()


def choose_threads(
    asked: int | None = None, *, root: Path = Path("/"), allowed: frozenset[int] | None = None
) -> ThreadChoice:
    """Threads for this process. `asked` is the user's number, `allowed` the affinity mask."""
    if allowed is None:
        allowed = _affinity()
    cores = _cores(root, allowed) if allowed else []
    processors = len(allowed) or os.cpu_count() or 1
    count = len(cores) or _physical_cores(processors)
    if asked is not None:
        threads, reason = min(asked, processors), "as set"
        if asked > processors:
            reason = f"{asked} are set, and there are {processors} processors"
        return ThreadChoice(threads=threads, reason=reason, processors=processors, cores=count)
    threads, keep_to = count, frozenset[int]()
    reason = _words(count, "physical core")
    if processors > count:
        reason += f" of {processors} processors"
    nodes = [node & allowed for node in _nodes(root) if node & allowed]
    if len(nodes) > 1:
        cores_of = [sum(not core.isdisjoint(node) for core in cores) for node in nodes]
        threads = max(cores_of)
        keep_to = nodes[cores_of.index(threads)]
        reason = f"{_words(threads, 'physical core')} of one of {len(nodes)} memory nodes"
    quota = cpu_quota(root)
    if quota is not None and int(quota) < threads:
        threads = max(1, int(quota))
        reason = f"a cgroup's quota of {quota:g} processors"
    return ThreadChoice(
        threads=threads, reason=reason, processors=processors, cores=count, keep_to=keep_to
    )


def stay_on(processors: frozenset[int]) -> None:
    """Keep the calling thread, and those that it starts, on these processors."""
    if processors and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, processors)
        except OSError:  # some sandboxes forbid it: slower, not wrong
            return


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors that the tightest cgroup around this process grants; None without a quota."""
    quotas = [_quota_of(folder) for folder in _groups(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path) -> list[Path]:
    """This process's cgroups that can bound processors, each with those around it. In a
    container a group's path may be the host's; the mounted root is the container's then."""
    mount = root / "sys/fs/cgroup"
    found: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers:
            if "cpu" not in controllers.split(","):
                continue
            bases = [mount / controllers, mount / "cpu"]
        else:
            bases = [mount, mount / "unified"]
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # a group outside this namespace
            parts = []
        found += [
            base.joinpath(*parts[:depth]) for base in bases for depth in range(len(parts) + 1)
        ]
    return found or [mount]


def _quota_of(folder: Path) -> float | None:
    limit, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not limit:
        limit = _text(folder / "cpu.cfs_quota_us").strip()
        period = _text(folder / "cpu.cfs_period_us").strip()
    if not limit or limit in _NO_QUOTA:
        return None
    try:
        quota = int(limit) / int(period or 100_000)
    except (ValueError, ZeroDivisionError):
        return None
    return quota if quota > 0 else None


def _cores(root: Path, allowed: frozenset[int]) -> list[frozenset[int]]:
    """Processors by physical core, those that are allowed; a core of its own where the system
    does not say."""
    found: dict[frozenset[int], None] = {}
    for cpu in sorted(allowed):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        listed = _text(folder / "thread_siblings_list") or _text(folder / "core_cpus_list")
        found[(_list_of(listed) & allowed) | {cpu}] = None
    return list(found)


def _nodes(root: Path) -> list[frozenset[int]]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    lists = [_list_of(_text(folder / "cpulist")) for folder in folders]
    return sorted((node for node in lists if node), key=min)


def _list_of(text: str) -> frozenset[int]:
    """`0-3,8` as numbers; empty for what is no such list."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return frozenset()
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset()


def _physical_cores(processors: int) -> int:
    """Where no files say it (macOS)."""
    import psutil  # here, because no Linux machine needs it

    return min(psutil.cpu_count(logical=False) or processors, processors)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _words(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
