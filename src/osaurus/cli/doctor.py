"""`osaurus doctor`: what this machine has, what is missing and how to get it.

Each check is a function that returns one `Check`; none changes anything that stays. Exit code
1 when one failed. Computes a little to see which kernels run, therefore imports torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from osaurus.cli.app import EXIT_FAILED, EXIT_OK
from osaurus.cli.client import ServerClient, configured_address, configured_host_and_port
from osaurus.cli.options import Json
from osaurus.cli.terminal import columns, human_bytes, say
from osaurus.errors import ModelNotFound, OsaurusError
from osaurus.settings.paths import Place, home, hub_cache_dir
from osaurus.settings.places import configured_models_dir

#: The default model, a compiled kernel and room to work.
_MIN_FREE_BYTES = 1_000_000_000
_MIN_MEMORY_BYTES = 2_000_000_000
_MIN_TORCH = (2, 11)
_OVERRIDES = (
    "OSAURUS_",
    "OSU_",
    "HF_",
    "HUGGINGFACE_",
    "XDG_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "PYTORCH_",
)
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`fix` is what to do, empty when there is nothing to do."""

    name: str
    status: Literal["pass", "warn", "fail"]
    detail: str
    fix: str = ""


def doctor(*, as_json: Json = False) -> int:
    """Say what this machine has and what is missing."""
    checks = [check() for check in CHECKS]
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print(columns(("CHECK", "", "FOUND"), [(c.name, c.status, c.detail) for c in checks]))
        for check in checks:
            if check.fix:
                print(f"{check.name}: {check.fix}")
        counts = Counter(check.status for check in checks)
        say(f"{counts['pass']} pass, {counts['warn']} warn, {counts['fail']} fail")
    return EXIT_FAILED if any(check.status == "fail" for check in checks) else EXIT_OK


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", status="pass", detail=f"{version} at {sys.executable}")


def check_processor() -> Check:
    from osaurus.bench.machine import read_machine

    machine = read_machine()
    detail = f"{machine.cpu}, {machine.cores} cores, {' '.join(machine.isa) or 'flags unknown'}"
    if machine.isa and "avx2" not in machine.isa and "asimd" not in machine.isa:
        return Check(
            name="processor",
            status="warn",
            detail=detail,
            fix="without AVX2 or ASIMD every kernel runs its slow form; another machine helps",
        )
    return Check(name="processor", status="pass", detail=detail)


def check_threads() -> Check:
    """How many threads compute, and what decided it."""
    from osaurus.kernels.cpu_topology import choose_threads
    from osaurus.settings.store import SettingsStore

    try:
        asked = SettingsStore().load().resolved["performance.threads"]
    except OsaurusError:  # the check of the settings says which
        return Check(name="threads", status="warn", detail="unknown", fix="mend the settings")
    choice = choose_threads(asked.value)
    source = f" by {asked.source}" if asked.value is not None and asked.source else ""
    detail = f"{choice.threads} compute: {choice.reason}{source}"
    if choice.threads > choice.cores:
        fix = f"more than the {choice.cores} cores is slower: set performance.threads to fewer"
        return Check(name="threads", status="warn", detail=detail, fix=fix)
    return Check(name="threads", status="pass", detail=detail)


def check_memory() -> Check:
    from osaurus.bench.machine import read_machine

    machine = read_machine()
    detail = (
        f"{human_bytes(machine.memory_available_bytes)} of {human_bytes(machine.memory_bytes)} free"
    )
    if machine.memory_available_bytes < _MIN_MEMORY_BYTES:
        fix = f"close programs: less than {human_bytes(_MIN_MEMORY_BYTES)} is left for a model"
        return Check(name="memory", status="warn", detail=detail, fix=fix)
    return Check(name="memory", status="pass", detail=detail)


def check_torch() -> Check:
    if find_spec("torch") is None:
        fix = "run scripts/install, or pip install torch"
        return Check(name="torch", status="fail", detail="not installed", fix=fix)
    from osaurus.bench.machine import torch_facts

    facts = torch_facts()
    version = str(facts["torch"])
    detail = f"{version}, {facts['threads']} threads, {facts['cpu_capability']}"
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_TORCH:
        fix = f"needs {'.'.join(map(str, _MIN_TORCH))} or newer: pip install -U torch"
        return Check(name="torch", status="fail", detail=detail, fix=fix)
    return Check(name="torch", status="pass", detail=detail)


def check_accelerator() -> Check:
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if find_spec("torch") is None:
        return Check(name="accelerator", status="warn", detail="unknown without torch")
    from osaurus.bench.machine import torch_facts

    facts = torch_facts()
    if facts["devices"]:
        names = ", ".join(facts["devices"])
        return Check(name="accelerator", status="pass", detail=f"CUDA {facts['cuda']}: {names}")
    if has_driver:
        return Check(
            name="accelerator",
            status="warn",
            detail="an NVIDIA driver is here, but this torch does not use it",
            fix="remove the venv and run scripts/install again, which takes a CUDA build here",
        )
    detail = "Apple GPU; models run on the CPU" if facts["mps"] else "none; models run on the CPU"
    return Check(name="accelerator", status="pass", detail=detail)


def check_kernels() -> Check:
    """Which form of the operations that decide the speed runs on this processor."""
    if find_spec("torch") is None:
        return Check(name="kernels", status="warn", detail="unknown without torch")
    from osaurus.kernels import linear, quant_matmul
    from osaurus.kernels.native.library import kernel_set, native

    if native().library is not None:
        return Check(name="kernels", status="pass", detail=f"native, {kernel_set()}")
    layout = quant_matmul.packed_layout()
    dense = str(linear.gemm_dtype()).removeprefix("torch.")
    weights = "by unpacking" if layout is None else f"packed ({layout.tile} rows a tile)"
    return Check(
        name="kernels",
        status="warn",
        detail=f"torch's: 4-bit weights {weights}, dense products in {dense}",
        fix=f"native kernels, several times faster at decoding, are {native().reason}",
    )


def check_settings_file() -> Check:
    from osaurus.settings.store import SettingsStore

    store = SettingsStore()
    where = str(store.path) if store.path.exists() else f"{store.path}, not there yet"
    try:
        settings = store.load()
    except OsaurusError as error:
        fix = "mend it with `osaurus config set`, or `osaurus config reset`"
        return Check(name="settings", status="fail", detail=error.message, fix=fix)
    changed = sum(one.origin != "default" for one in settings.resolved.values())
    detail = f"{where}, {changed} changed"
    if settings.notices:
        return Check(name="settings", status="warn", detail=detail, fix="; ".join(settings.notices))
    return Check(name="settings", status="pass", detail=detail)


def check_home() -> Check:
    return _writable("home", home(), "OSAURUS_HOME")


def check_models_dir() -> Check:
    return _writable("models directory", configured_models_dir(), "OSAURUS_MODELS_DIR")


def _writable(name: str, place: Place, variable: str) -> Check:
    """Write where the first missing directory would be made, and leave nothing behind."""
    detail = f"{place.path} ({place.reason})"
    existing = place.path
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        fix = f"make it writable or set {variable}: {error.strerror}"
        return Check(name=name, status="fail", detail=detail, fix=fix)
    detail = f"{detail}, {human_bytes(free)} free"
    if free < _MIN_FREE_BYTES:
        fix = f"make room, or set {variable} to another disk"
        return Check(name=name, status="warn", detail=detail, fix=fix)
    return Check(name=name, status="pass", detail=detail)


def check_default_model() -> Check:
    from osaurus.bundle.bundle import open_bundle
    from osaurus.bundle.hub import find_model

    try:
        listing = find_model("default")
        open_bundle(listing.path, listing.model_id)
    except ModelNotFound:
        fix = "osaurus pull default"
        return Check(name="default model", status="warn", detail="not here", fix=fix)
    except OsaurusError as error:
        fix = "fetch it again: osaurus pull default"
        return Check(name="default model", status="fail", detail=error.message, fix=fix)
    return Check(name="default model", status="pass", detail=listing.model_id)


def check_models() -> Check:
    from osaurus.bundle.hub import list_models

    models = list_models()
    broken = [model for model in models if not model.available]
    detail = f"{len(models) - len(broken)} can be loaded"
    if broken:
        fix = "; ".join(f"{model.model_id}: {model.problem}" for model in broken)
        detail += f", {len(broken)} cannot"
        return Check(name="models", status="warn", detail=detail, fix=fix)
    return Check(name="models", status="pass", detail=detail)


def check_port() -> Check:
    host, port = configured_host_and_port()
    with ServerClient(configured_address()) as client:
        if client.health() is not None:
            detail = f"osaurus is running at {client.address}"
            return Check(name="port", status="pass", detail=detail)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return Check(
            name="port",
            status="warn",
            detail=f"{host}:{port} cannot be used: {error.strerror}",
            fix="stop the program there, or set OSAURUS_SERVER__PORT",
        )
    return Check(name="port", status="pass", detail=f"{host}:{port} is free")


def check_hub() -> Check:
    from huggingface_hub import constants, get_token

    place = hub_cache_dir()
    account = "with a token" if get_token() else "without a token"
    detail = f"{account}, cache {place.path} ({place.reason})"
    if constants.HF_HUB_OFFLINE:
        fix = "HF_HUB_OFFLINE is set: nothing is fetched from the hub; unset it to pull models"
        return Check(name="hub", status="warn", detail=f"offline, {detail}", fix=fix)
    return Check(name="hub", status="pass", detail=detail)


def check_optional() -> Check:
    """Packages that only some models or tests need; absence is no fault."""
    found = [name for name in ("transformers", "triton", "gguf") if find_spec(name)]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in found]
    return Check(name="optional", status="pass", detail=", ".join(versions) or "none")


def check_environment() -> Check:
    """Variables that change what osaurus does; secrets are named, never shown."""
    shown = []
    for name in sorted(os.environ):
        if name.startswith(_OVERRIDES):
            is_secret = any(word in name for word in _SECRET_WORDS)
            shown.append(f"{name}={'***' if is_secret else os.environ[name]}")
    return Check(name="environment", status="pass", detail=" ".join(shown) or "nothing set")


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_processor,
    check_threads,
    check_memory,
    check_torch,
    check_accelerator,
    check_kernels,
    check_settings_file,
    check_home,
    check_models_dir,
    check_default_model,
    check_models,
    check_port,
    check_hub,
    check_optional,
    check_environment,
)
