"""Compile the native kernels into one library beside this file.

    python -m osaurus.kernels.native.build

The wheel's build and an editable install do the same. Only the standard library is used, and
without a compiler nothing is made: the torch forms of every operation then run.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "libosaurus.so"

_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # templates of one product must round alike
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",  # GCC 12 takes its own intrinsics for uninitialised
    "-Wno-uninitialized",
]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
#: Instruction set -> flags. Which of them runs is decided on the user's machine.
_X86_SETS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": _AVX512,
    "avx512bf16": [*_AVX512, "-mavx512bf16"],
}
#: On Arm the base set has NEON and is the only one.
_OTHER_SETS: dict[str, list[str]] = {"portable": []}


class CannotBuild(Exception):
    """Why there will be no native kernels here."""


def find_compiler() -> list[str]:
    """The C++ compiler: CXX, else the first of g++, clang++ and c++ that is on the path."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("no C++ compiler (g++ or clang++) was found; CXX names one")


def build(directory: Path = HERE, *, compiler: list[str] | None = None) -> Path:
    """Compile into `directory` and return the library's path. Raises `CannotBuild`."""
    if sys.platform not in ("linux", "darwin"):
        raise CannotBuild(f"native kernels are not made for {sys.platform}")
    compiler = compiler or find_compiler()
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    sets = _X86_SETS if is_x86 and "aarch64" not in compiler[0] else _OTHER_SETS
    with tempfile.TemporaryDirectory() as scratch:
        # Code for any processor comes first: of an inline function that several objects have,
        # a linker keeps the first.
        jobs = [(HERE / f"{name}.cpp", Path(scratch, f"{name}.o"), []) for name in _COMMON]
        jobs += [
            (
                HERE / f"{part}.cpp",
                Path(scratch, f"{part}-{name}.o"),
                [f"-DOSAURUS_KERNELS={name}", *more],
            )
            for name, more in sets.items()
            for part in _EACH_SET
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(
                pool.map(
                    lambda job: _run(
                        [*compiler, *_FLAGS, *job[2], "-c", str(job[0]), "-o", str(job[1])]
                    ),
                    jobs,
                )
            )
        made = Path(scratch, LIBRARY)
        objects = [str(job[1]) for job in jobs]
        _run([*compiler, "-shared", "-o", str(made), *objects, "-lpthread"])
        directory.mkdir(parents=True, exist_ok=True)
        # Renamed into place: a process that has the old one mapped keeps it.
        beside = directory / f".{LIBRARY}.{os.getpid()}"
        shutil.copyfile(made, beside)
        os.replace(beside, directory / LIBRARY)
    return directory / LIBRARY


_COMMON = ("api", "choice", "codes", "step", "threads")
_EACH_SET = ("execute", "vectors")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuild(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise CannotBuild(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except CannotBuild as reason:
        sys.exit(str(reason))
