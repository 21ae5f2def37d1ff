"""Claims: the native kernels compile for Arm and compute there what plain scalar sums do, a row's
bits being its own (native_check.cpp), under QEMU; the same program passes on this processor.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from osaurus.kernels.native.build import HERE, LIBRARY, CannotBuild, build, find_compiler

CHECK = Path(__file__).with_name("native_check.cpp")
CROSS = "aarch64-linux-gnu-g++"
QEMU = next((name for name in ("qemu-aarch64-static", "qemu-aarch64") if shutil.which(name)), "")


def _checked(folder: Path, compiler: list[str], run: list[str]) -> str:
    """Compile the program against the library in `folder` and run it; gives what it printed."""
    program = folder / "check"
    command = [*compiler, "-std=c++17", "-O1", f"-I{HERE}", str(CHECK), "-o", str(program)]
    command += [str(folder / LIBRARY), f"-Wl,-rpath,{folder}", "-lpthread"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    done = subprocess.run([*run, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(CROSS), reason=f"{CROSS} is not installed")
@pytest.mark.skipif(not QEMU, reason="qemu-user is not installed")
def test_kernels_of_arm_compute_what_scalar_sums_do(tmp_path: Path) -> None:
    build(tmp_path, compiler=[CROSS])
    said = _checked(tmp_path, [CROSS], [QEMU, "-L", "/usr/aarch64-linux-gnu"])
    assert said == "kernels: portable\nall right\n"


@pytest.mark.slow
def test_the_same_program_passes_on_this_processor(tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
    except CannotBuild as reason:
        pytest.skip(str(reason))
    if not (HERE / LIBRARY).exists():
        pytest.skip("the library is not compiled here")
    shutil.copy(HERE / LIBRARY, tmp_path)
    assert "all right" in _checked(tmp_path, compiler, [])
