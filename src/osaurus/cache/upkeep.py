"""Upkeep of the disk tier's directory: schema, sweep, quota, verification.

What two processes must not do at once (schema, sweep, eviction) happens under the
directory's lock; whoever does not get it in time leaves the work to the one who has it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from osaurus.cache.counters import Counters
from osaurus.cache.files import INDEX_NAME, RecordFiles, is_old
from osaurus.cache.index import SCHEMA_VERSION, RecordIndex, is_full
from osaurus.cache.record_file import CorruptRecord, RecordHeader, verify_file

#: How long one process waits for another one's purge or eviction.
_LOCK_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found. `damaged`: key and what is wrong; such files are in quarantine.

    `missing`: rows whose file was gone; `unreadable`: files this process may not read,
    with the system's reason, left where they are.
    """

    checked: int
    checked_bytes: int
    damaged: tuple[tuple[str, str], ...]
    unreadable: tuple[tuple[str, str], ...]
    missing: int
    orphans: int


def prepare_index(files: RecordFiles, now: float) -> RecordIndex | str:
    """An index of the current schema, or why there is none.

    An older or damaged index goes, with all records, since nothing in it can be trusted; a
    newer one belongs to a newer program and is left alone. Raises OSError, sqlite3.Error.
    """
    index = RecordIndex(files.directory / INDEX_NAME)
    if _schema_of(index) == SCHEMA_VERSION:
        return index
    with files.lock(_LOCK_WAIT_S) as has_lock:
        found = _schema_of(index)  # another process may have been here meanwhile
        if found == SCHEMA_VERSION:
            return index
        if found is not None and found > SCHEMA_VERSION:
            index.close()
            return (
                f"{index.path} has schema {found}, from a newer osaurus; "
                f"this one knows {SCHEMA_VERSION}"
            )
        if not has_lock:
            index.close()
            return f"{files.directory} is locked by another process"
        files.remove_everything(now)
        if found is None:
            index.close()
            for suffix in ("", "-wal", "-shm"):
                index.path.with_name(index.path.name + suffix).unlink(missing_ok=True)
            index = RecordIndex(index.path)
            _schema_of(index)
        index.create()
        return index


def sweep(files: RecordFiles, index: RecordIndex, counters: Counters, now: float) -> None:
    """Make rows and files agree and remove what a crash has left; files are the truth.

    Raises OSError, sqlite3.Error.
    """
    with files.lock() as has_lock:
        if not has_lock:
            return
        # Rows first: a record stored meanwhile is then a young file, not a lying row.
        rows = {row.key: row.file_size for row in index.rows()}
        stored = files.scan()
        lying = [key for key, size in rows.items() if key not in stored or stored[key].size != size]
        if lying:
            index.remove(lying)
            counters.add("rows_removed", len(lying))
        for key in lying:
            if files.remove(key):
                counters.add("corruptions")
        _remove_orphans(files, (key for key in stored if key not in rows), counters, now)
        counters.add("orphans_removed", files.remove_stale_temporaries(now))
        files.trim_quarantine(files.quarantine_bytes)


def enforce_quota(
    files: RecordFiles, index: RecordIndex, counters: Counters, quota_bytes: int
) -> None:
    """Evict until the records fit. Raises OSError, sqlite3.Error.

    Waits for another process that evicts: what it chose may not reckon with our last store.
    """
    if index.totals()[1] <= quota_bytes:
        return
    with files.lock(_LOCK_WAIT_S) as has_lock:
        if has_lock:
            keys = index.choose_evictions(quota_bytes)
            delete(files, index, keys)
            counters.add("evictions", len(keys))


def delete(files: RecordFiles, index: RecordIndex, keys: list[str]) -> None:
    """Remove rows, then files: a crash between them leaves an orphan, not a lie."""
    try:
        index.remove(keys)
    except sqlite3.OperationalError as error:
        if not is_full(error):
            raise
        # On a volume full to the last byte even forgetting needs room, which the files make.
        for key in keys:
            files.remove(key)
        index.remove(keys)
    for key in keys:
        files.remove(key)


def verify(files: RecordFiles, index: RecordIndex, counters: Counters, now: float) -> VerifyReport:
    """Read every record and check it; damaged ones go to quarantine.

    Takes no lock: records may come and go meanwhile. Raises OSError, sqlite3.Error.
    """
    damaged: list[tuple[str, str]] = []
    unreadable: list[tuple[str, str]] = []
    checked = checked_bytes = missing = 0
    rows = index.rows()
    for row in rows:
        try:
            check_identity(verify_file(files.path(row.key), row.file_size), row.key, row.namespace)
        except FileNotFoundError:
            missing += index.remove([row.key])
            continue
        except (CorruptRecord, OSError) as error:
            if not is_damage(error):
                unreadable.append((row.key, str(error)))
                continue
            files.quarantine(row.key)
            index.remove([row.key])
            counters.add("corruptions")
            damaged.append((row.key, str(error)))
        checked += 1
        checked_bytes += row.file_size
    known = {row.key for row in rows}
    orphans = _remove_orphans(
        files,
        (key for key in files.scan() if key not in known and index.row(key) is None),
        counters,
        now,
    )
    return VerifyReport(
        checked=checked,
        checked_bytes=checked_bytes,
        damaged=tuple(damaged),
        unreadable=tuple(unreadable),
        missing=missing,
        orphans=orphans,
    )


def check_identity(header: RecordHeader, key: str, namespace: str) -> None:
    """Raises `CorruptRecord` when a file is not the record its name and row say it is."""
    if (header.key, header.namespace) != (key, namespace):
        raise CorruptRecord(f"it is record {header.key} of another place")


def is_damage(error: Exception) -> bool:
    """Whether a failed read means that the file is bad, not that this process is short of
    something."""
    return isinstance(error, CorruptRecord) or getattr(error, "errno", None) == errno.EIO


def _remove_orphans(
    files: RecordFiles, candidates: Iterable[str], counters: Counters, now: float
) -> int:
    count = 0
    for key in list(candidates):
        try:
            if is_old(os.stat(files.path(key)).st_mtime, now):
                count += files.remove(key)
        except FileNotFoundError:
            continue
    counters.add("orphans_removed", count)
    return count


def _schema_of(index: RecordIndex) -> int | None:
    """None for a file that is no database, or a damaged one."""
    try:
        return index.schema_version() if index.is_sound() else None
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return None
