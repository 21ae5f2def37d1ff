"""The compiled library, if there is one here, and why not otherwise."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

from osaurus.kernels.native.build import HERE, LIBRARY
from osaurus.kernels.openmp import team_function

_ABI = 2

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "osaurus_abi": (_INT, []),
    "osaurus_kernels": (ctypes.c_char_p, []),
    "osaurus_kernels_at": (ctypes.c_char_p, [_INT]),
    "osaurus_use_kernels": (None, [_INT]),
    "osaurus_join_team": (None, [_POINTER]),
    "osaurus_matrix_bytes": (_LONG, [_POINTER]),
    "osaurus_pack": (None, [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER]),
    "osaurus_rows": (None, [_POINTER, _POINTER, _INT, _POINTER, _INT]),
    "osaurus_linear": (_INT, [_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT]),
    "osaurus_program": (_POINTER, [_POINTER, _INT, _POINTER, _INT]),
    "osaurus_free": (None, [_POINTER]),
    "osaurus_run": (_INT, [_POINTER, _POINTER, _INT, _INT]),
    "osaurus_largest": (_INT, [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT]),
    "osaurus_choose": (_INT, [_POINTER, _LONG, _INT]),
    "osaurus_coded_scores": (
        None,
        [_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _INT, _INT, _POINTER, _POINTER, _INT],
    ),
    "osaurus_coded_sums": (
        None,
        [_POINTER, _POINTER, _POINTER, _LONG, _INT, _INT, _POINTER, _POINTER, _INT],
    ),
}


@dataclass(frozen=True, slots=True)
class Native:
    """`library` is None when native kernels are not in use; `reason` then says why."""

    library: ctypes.CDLL | None
    reason: str = ""


@cache
def native() -> Native:
    """Load the library once."""
    if os.environ.get("OSAURUS_NATIVE", "1").lower() in ("0", "false", "no", "off"):
        return Native(None, "switched off by OSAURUS_NATIVE")
    path = HERE / LIBRARY
    if not path.exists():
        return Native(
            None,
            "not compiled: install a C++ compiler, then run python -m osaurus.kernels.native.build",
        )
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return Native(
            None,
            f"{path.name} cannot be loaded ({error}); compile it again with "
            "python -m osaurus.kernels.native.build",
        )
    if library.osaurus_abi() != _ABI:
        return Native(
            None,
            f"{path.name} belongs to another version; compile it again with "
            "python -m osaurus.kernels.native.build",
        )
    team = team_function("GOMP_parallel")
    if team is not None:
        library.osaurus_join_team(ctypes.cast(team, ctypes.c_void_p))
    return Native(library)


def library() -> ctypes.CDLL:
    """The library; only after `native()` has said that there is one."""
    loaded = native().library
    if loaded is None:
        raise RuntimeError(f"native kernels: {native().reason}")
    return loaded


def kernel_set() -> str:
    """The instruction set whose kernels run, for people to read."""
    return library().osaurus_kernels().decode()


def kernel_sets() -> tuple[str, ...]:
    """The sets of this build that this processor has, the best first."""
    names: list[str] = []
    while (name := library().osaurus_kernels_at(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def use_kernel_set(name: str) -> None:
    """Run another set's kernels from now on, for tests; programs made before are void."""
    library().osaurus_use_kernels(kernel_sets().index(name))
