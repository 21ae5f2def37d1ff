"""How much memory there is: the host's within the limits of this process's cgroup, a device's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from osaurus.runtime.lost_device import telling_a_lost_device

#: Where the limits of a control group are, and what the second version of them calls "none".
_CGROUPS = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """`name` is `host` or the device's. What a limit hides does not count as physical."""

    name: str
    physical_bytes: int
    available_bytes: int


def host_memory(cgroups: Path = _CGROUPS, own: Path = _SELF) -> Memory:
    machine = psutil.virtual_memory()
    physical, available = machine.total, machine.available
    for folder in _groups(cgroups, own):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None:
                physical = min(physical, limit)
                available = min(available, max(0, limit - (used or 0)))
    return Memory(name="host", physical_bytes=physical, available_bytes=available)


def device_memory(device: str) -> Memory | None:
    """None for one that has no memory of its own. Imports torch. Raises `DeviceLost`."""
    if not device.startswith("cuda"):
        return None
    import torch

    with telling_a_lost_device(device):
        free, total = torch.cuda.mem_get_info(torch.device(device))
    return Memory(name=device, physical_bytes=total, available_bytes=free)


def _groups(cgroups: Path, own: Path) -> list[Path]:
    """The process's group and those around it: each of them may set a limit. In a container
    its own group is the root that it sees."""
    folders = {cgroups, cgroups / "memory"}
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = cgroups / "memory" if controllers else cgroups
        folder = base / path.lstrip("/")
        while folder != base:
            folders.add(folder)
            folder = folder.parent
    return sorted(folders)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or the word `max`
        return None
