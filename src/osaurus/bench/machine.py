"""What this machine is: the facts without which a speed means nothing.

Reads the operating system only; torch's own facts are asked for separately, because asking
imports it.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from osaurus.kernels import cpu
from osaurus.kernels.cpu_topology import choose_threads

#: Instruction sets that decide which kernels can run, as the operating system spells them.
_RELEVANT_ISA = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`cores` are the physical ones of this process; `memory_available_bytes` as of now."""

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
    flags = cpu.isa_flags()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=cpu.model_name(),
        cores=choose_threads().cores,
        isa=tuple(flag for flag in _RELEVANT_ISA if flag in flags),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        load_average=round(psutil.getloadavg()[0], 2),
        python=platform.python_version(),
    )


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
