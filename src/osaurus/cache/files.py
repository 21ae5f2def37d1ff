"""The disk tier's directory: names, whole-or-nothing writes, quarantine, the lock.

    <key>.safetensors                 a record
    .<key>.<pid>.<random>.tmp         one being written
    quarantine/<key>.safetensors      one that was found damaged
    cache_index.db, cache.lock        index and lock of upkeep

A user may have named a directory with other things in it: only names of these forms are
ever touched. Files get mode 0600, a directory that is made here 0700, because records are
derived from what people wrote.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from osaurus.cache.record_file import PIECE_BYTES, checksum_offset

INDEX_NAME = "cache_index.db"
#: A file without a row, or a temporary one that nobody writes to, is left for this long:
#: another process may be between its two steps.
ORPHAN_AGE_S = 600.0

_LOCK_NAME = "cache.lock"
_QUARANTINE = "quarantine"
_QUARANTINE_FILES = 16
_SUFFIX = ".safetensors"
_RECORD = re.compile(r"([0-9a-f]{32})\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.(\d+)\.[0-9a-f]{16}\.tmp")
_LOCK_POLL_S = 0.01

#: Temporary files this process is writing. A process id alone does not tell: in a
#: container the one before had the same.
_being_written: set[str] = set()

StepHook = Callable[[str], None]  #: called with the step of a write that has just been done
Throttle = Callable[[int], None]  #: called after each piece with its bytes; may wait


class StoredFile(NamedTuple):
    size: int
    mtime: float


def no_step(step: str) -> None:
    """The step hook that does nothing; tests put faults in its place."""


def no_throttle(piece_bytes: int) -> None:
    """The throttle that never waits."""


class RecordFiles:
    """One directory's files. Any thread may call this; every method may raise OSError."""

    def __init__(self, directory: Path, *, quarantine_bytes: int) -> None:
        self.directory = directory
        self.quarantine_bytes = quarantine_bytes
        self._prefix = f"{directory}{os.sep}"

    def path(self, key: str) -> str:
        return f"{self._prefix}{key}{_SUFFIX}"

    def size(self, key: str) -> int | None:
        """Size of a record's file; None without one."""
        try:
            return os.stat(self.path(key)).st_size
        except FileNotFoundError:
            return None

    def write(
        self,
        key: str,
        header: bytearray,
        data: Sequence[memoryview],
        *,
        throttle: Throttle = no_throttle,
        at_step: StepHook = no_step,
    ) -> int:
        """Write a record whole or not at all; return its size in bytes.

        `header` and `data` as `records.encode` makes them. Hashes what it writes piece by
        piece, so that each piece is still in the processor's cache. Steps: created,
        written, synced, replaced.
        """
        name = f".{key}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
        temporary = f"{self._prefix}{name}"
        _being_written.add(name)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                at_step("created")
                digest = hashlib.sha256(header)
                _write_all(fd, memoryview(header))
                for part in data:
                    for at in range(0, len(part), PIECE_BYTES):
                        piece = part[at : at + PIECE_BYTES]
                        digest.update(piece)
                        _write_all(fd, piece)
                        throttle(len(piece))
                os.pwrite(fd, digest.hexdigest().encode(), checksum_offset(header))
                at_step("written")
                os.fsync(fd)
                at_step("synced")
            finally:
                os.close(fd)
            os.replace(temporary, self.path(key))
            at_step("replaced")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            _being_written.discard(name)
        return len(header) + sum(len(part) for part in data)

    def remove(self, key: str) -> bool:
        """Delete a record's file, if there. Safe while another process reads it."""
        try:
            os.unlink(self.path(key))
        except (FileNotFoundError, IsADirectoryError):
            return False  # a directory of that name is not ours
        return True

    def quarantine(self, key: str) -> None:
        """Put a damaged record aside for whoever wants to look, within bounds."""
        folder = self.directory / _QUARANTINE
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path(key), folder / f"{key}{_SUFFIX}")
        self.trim_quarantine(self.quarantine_bytes)

    def trim_quarantine(self, limit_bytes: int) -> None:
        """Keep the newest few, `limit_bytes` of them at most."""
        kept_bytes = 0
        found = sorted(self._quarantined(), key=lambda item: -item[1].st_ctime)
        for number, (path, status) in enumerate(found, 1):
            kept_bytes += status.st_size
            if number > _QUARANTINE_FILES or kept_bytes > limit_bytes:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                kept_bytes -= status.st_size

    def quarantine_size(self) -> int:
        """Bytes in quarantine."""
        return sum(status.st_size for _, status in self._quarantined())

    def _quarantined(self) -> Iterator[tuple[str, os.stat_result]]:
        with (
            contextlib.suppress(FileNotFoundError),
            os.scandir(self.directory / _QUARANTINE) as entries,
        ):
            for entry in entries:
                if _RECORD.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.path, entry.stat(follow_symlinks=False)

    def scan(self) -> dict[str, StoredFile]:
        """Every record's file by key."""
        found: dict[str, StoredFile] = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                match = _RECORD.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found[match[1]] = StoredFile(status.st_size, status.st_mtime)
        return found

    def remove_stale_temporaries(self, now: float) -> int:
        """Delete temporary files whose writer is gone or has not written for ten minutes."""
        count = 0
        with os.scandir(self.directory) as entries:
            for entry in entries:
                match = _TEMPORARY.fullmatch(entry.name)
                if match is None or entry.name in _being_written:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    pid, mtime = int(match[1]), entry.stat(follow_symlinks=False).st_mtime
                    if pid == os.getpid() or not _is_alive(pid) or is_old(mtime, now):
                        os.unlink(entry.path)
                        count += 1
        return count

    def remove_everything(self, now: float) -> None:
        """Delete every record, what is left of dead writers and the quarantine."""
        for key in self.scan():
            self.remove(key)
        self.trim_quarantine(0)
        self.remove_stale_temporaries(now)

    @contextlib.contextmanager
    def lock(self, wait_s: float = 0.0) -> Generator[bool]:
        """Hold the directory's advisory lock; yields whether it was to be had in time.

        For what two processes must not do at once: change the schema, sweep, evict. Reading
        and storing need none.
        """
        fd = os.open(self.directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield _try_lock(fd, wait_s)
        finally:
            os.close(fd)


def probe(directory: Path) -> None:
    """Make the directory if need be and prove that it can be written. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f".{'0' * 32}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
    payload = secrets.token_bytes(64)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _write_all(fd, memoryview(payload))
        os.fsync(fd)
        if os.pread(fd, 65, 0) != payload:
            raise OSError(errno.EIO, "what was written does not read back", str(path))
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def is_old(mtime: float, now: float) -> bool:
    """Whether a file was last written ten minutes from `now`, whichever way: after a clock
    was set back, files from the future must not stay for ever."""
    return abs(now - mtime) > ORPHAN_AGE_S


def _write_all(fd: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _try_lock(fd: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_S)
        else:
            return True
