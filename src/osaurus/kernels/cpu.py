"""What this processor can do, as far as the choice of a kernel depends on it."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


@cache
def isa_flags() -> frozenset[str]:
    """Instruction-set flags as the kernel names them; empty where they cannot be read."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def has_bfloat16_products() -> bool:
    """Whether bfloat16 dot products are instructions here (AVX-512 BF16, AMX or Arm BF16)."""
    return not isa_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def has_amx() -> bool:
    """Whether bfloat16 matrices are multiplied in tiles here (Intel AMX)."""
    return "amx_bf16" in isa_flags()


def model_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
