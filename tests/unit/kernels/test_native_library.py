"""Claims: whatever is wrong with the compiled library, osaurus runs without it and says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from osaurus.kernels.native import library
from osaurus.kernels.native.build import CannotBuild, build, find_compiler
from osaurus.kernels.native.library import native


@pytest.fixture(autouse=True)
def loaded_anew() -> Iterator[None]:
    """What was loaded stays in the cache of the process for the other tests."""
    before = native()
    native.cache_clear()
    yield
    native.cache_clear()
    assert native().library is None or before.library is not None


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_the_environment_switches_native_kernels_off(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSAURUS_NATIVE", value)
    assert native().library is None
    assert "OSAURUS_NATIVE" in native().reason
    with pytest.raises(RuntimeError, match="OSAURUS_NATIVE"):
        library.library()


def test_a_library_that_is_missing_or_broken_is_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OSAURUS_NATIVE", raising=False)
    monkeypatch.setattr(library, "HERE", tmp_path)
    assert native().library is None
    assert "compiler" in native().reason
    (tmp_path / library.LIBRARY).write_bytes(b"not a library")
    native.cache_clear()
    assert native().library is None
    assert "cannot be loaded" in native().reason


def test_without_a_compiler_the_build_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuild, match="CXX"):
        find_compiler()
    with pytest.raises(CannotBuild, match="cannot be run"):
        build(tmp_path, compiler=[str(tmp_path / "g++")])


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    out = tmp_path / "out"
    with pytest.raises(CannotBuild, match="no such header"):
        build(out, compiler=[str(compiler)])
    assert not out.exists()


def test_the_builder_runs_where_osaurus_is_not_installed(tmp_path: Path) -> None:
    """As the wheel's build hook runs it."""
    path = Path(library.__file__).parent / "build.py"
    code = f"import runpy; print(runpy.run_path({str(path)!r})['LIBRARY'])"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == library.LIBRARY
