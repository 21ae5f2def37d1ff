"""What this machine is: the facts without which a speed means nothing.

Reads the operating system only; torch's own facts are asked for separately, because asking
imports it.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

#: Instruction sets that decide which kernels can run, in the spelling of /proc/cpuinfo.
_RELEVANT_ISA = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`cores` are those this process may run on; `memory_available_bytes` as of now."""

    system: str
    cpu: str
    cores: int
    isa: tuple[str, ...]
    memory_bytes: int
    memory_available_bytes: int
    load_average: float
    python: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_machine() -> Machine:
    memory = psutil.virtual_memory()
    cpu, isa = _read_cpu()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=cpu,
        cores=usable_cores(),
        isa=isa,
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        load_average=round(psutil.getloadavg()[0], 2),
        python=platform.python_version(),
    )


def usable_cores() -> int:
    """Cores this process may be scheduled on, as a container or taskset left them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_facts() -> dict[str, Any]:
    """Versions, threads and devices as torch sees them. Imports torch."""
    import torch

    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "mps": torch.backends.mps.is_available(),
    }


def rss_bytes() -> int:
    """Resident memory of this process, mapped weight files included."""
    return psutil.Process().memory_info().rss


def _read_cpu() -> tuple[str, tuple[str, ...]]:
    """Model name and relevant instruction sets; both from /proc/cpuinfo where there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or "unknown", ()
    name, flags = "", set[str]()
    for line in cpuinfo.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not name:
            name = value.strip()
        elif key.strip() in ("flags", "Features") and not flags:
            flags = set(value.split())
    return name or platform.processor() or "unknown", tuple(f for f in _RELEVANT_ISA if f in flags)
