"""The disk tier's index: which record holds which block, and which was used when.

SQLite in WAL mode, one connection a thread. Rows are hints, files are the truth: a row is
made after its file and removed before it, and everything here can be thrown away.

Recency is a counter, not a time, so that a clock set back does not turn the order round.
What a record hangs on is at least as recent as the record: `insert` and `touch` climb the
chain of parents. With ties broken from the end of the prefix, a parent is then never
evicted before what needs it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from osaurus.cache.record_file import RecordKind

if TYPE_CHECKING:
    from osaurus.cache.records import Record

#: Raised whenever tables, files or keys change their meaning.
SCHEMA_VERSION = 1

_BUSY_TIMEOUT_MS = 5000
_MAX_PARAMETERS = 500  #: older SQLite builds allow 999 a statement

_TABLES = """
CREATE TABLE records (
    key TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    model TEXT NOT NULL,
    kind TEXT NOT NULL,
    first_token INTEGER NOT NULL,
    end_token INTEGER NOT NULL,
    parent BLOB NOT NULL,
    file_size INTEGER NOT NULL,
    created_at REAL NOT NULL,
    last_used_at REAL NOT NULL,
    recency INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX records_by_recency ON records(recency);
CREATE INDEX records_by_parent ON records(parent);
CREATE TABLE blocks (
    digest BLOB NOT NULL,
    key TEXT NOT NULL REFERENCES records(key) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    PRIMARY KEY (digest, key)
) WITHOUT ROWID;
CREATE INDEX blocks_by_key ON blocks(key);
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""

#: Newest recency for the keys of a JSON list and every run they hang on.
_TOUCH = """
WITH RECURSIVE chain(key) AS (
    SELECT value FROM json_each(?)
    UNION
    SELECT above.key FROM chain
    JOIN records AS below ON below.key = chain.key
    JOIN blocks ON blocks.digest = below.parent
    JOIN records AS above ON above.key = blocks.key AND above.kind = 'run'
)
UPDATE records SET last_used_at = ?, recency = (SELECT MAX(recency) + 1 FROM records)
WHERE key IN (SELECT key FROM chain)
"""

#: First one first: what can never fit, then the least recent, a prefix from its end.
_EVICTION_ORDER = """
SELECT key, kind, file_size FROM records
ORDER BY file_size > ? DESC, recency, end_token DESC, kind DESC, key
"""

#: Snapshots that hang on a run's blocks and on no other run's.
_HANGING_SNAPSHOTS = """
SELECT key, file_size FROM records WHERE kind = 'snapshot' AND parent IN (
    SELECT digest FROM blocks WHERE key = :key
    EXCEPT
    SELECT digest FROM blocks JOIN records USING (key)
    WHERE kind = 'run' AND records.key != :key
)
"""

_ROW = (
    "SELECT key, namespace, model, kind, first_token, end_token, file_size, created_at, "
    "last_used_at, recency FROM records"
)


class RecordRow(NamedTuple):
    """One record as the index knows it. Times are seconds since the epoch."""

    key: str
    namespace: str
    model: str
    kind: RecordKind
    first_token: int
    end_token: int
    file_size: int
    created_at: float
    last_used_at: float
    recency: int


class _Connection:
    """Closes with its thread, whose locals hold the only reference."""

    def __init__(self, path: Path) -> None:
        # SQLite would make a file that others can read; its -wal and -shm take after it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        # Closed by whichever thread drops the last reference; used by one only.
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.db.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
        self.db.execute("PRAGMA foreign_keys=ON")
        self.db.execute("PRAGMA synchronous=NORMAL")

    def __del__(self) -> None:
        if hasattr(self, "db"):
            self.db.close()


class RecordIndex:
    """Any thread may call this; every method may raise `sqlite3.Error`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._open: weakref.WeakSet[_Connection] = weakref.WeakSet()

    def schema_version(self) -> int:
        """0 for an empty database."""
        return self._db.execute("PRAGMA user_version").fetchone()[0]

    def is_sound(self) -> bool:
        """SQLite's own check of the whole file; some milliseconds for thousands of records."""
        return self._db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"

    def create(self) -> None:
        """Drop whatever tables there are and make ours."""
        db = self._db
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA foreign_keys=OFF")
        with self._transaction():
            query = (
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite!_%' "
                "ESCAPE '!'"
            )
            for (name,) in db.execute(query).fetchall():
                db.execute('DROP TABLE "{}"'.format(name.replace('"', '""')))
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        db.execute("PRAGMA foreign_keys=ON")

    def insert(self, record: Record, file_size: int, now: float) -> None:
        """Add or renew a record's row as the most recent one."""
        with self._transaction() as db:
            db.execute(
                "REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                (
                    record.key,
                    record.namespace,
                    record.model,
                    record.kind,
                    record.first_token,
                    record.end_token,
                    record.parent,
                    file_size,
                    now,
                    now,
                ),
            )
            db.executemany(
                "INSERT OR IGNORE INTO blocks VALUES (?, ?, ?)",
                [(digest, record.key, place) for place, digest in enumerate(record.blocks)],
            )
            db.execute(_TOUCH, (_json_list([record.key]), now))

    def touch(self, keys: Iterable[str], now: float) -> None:
        """Make records, and the runs they hang on, the most recent ones, all alike."""
        self._db.execute(_TOUCH, (_json_list(keys), now))

    def remove(self, keys: Sequence[str]) -> int:
        """Delete rows; return how many there were."""
        query = "DELETE FROM records WHERE key IN (SELECT value FROM json_each(?))"
        return self._db.execute(query, (_json_list(keys),)).rowcount

    def row(self, key: str) -> RecordRow | None:
        found = self._db.execute(f"{_ROW} WHERE key = ?", (key,)).fetchone()
        return None if found is None else RecordRow(*found)

    def rows(self) -> list[RecordRow]:
        """All records, the most recently used first."""
        query = f"{_ROW} ORDER BY recency DESC, first_token, kind, key"
        return [RecordRow(*found) for found in self._db.execute(query)]

    def find(
        self, namespace: str, kind: RecordKind, digests: Sequence[bytes]
    ) -> list[tuple[bytes, str, int, int]]:
        """(digest, key, place, file size) of every record of `kind` that holds one of them."""
        blocks: list[tuple[bytes, str, int]] = []
        for at in range(0, len(digests), _MAX_PARAMETERS):
            part = digests[at : at + _MAX_PARAMETERS]
            marks = ",".join("?" * len(part))
            query = f"SELECT digest, key, place FROM blocks WHERE digest IN ({marks})"
            blocks += self._db.execute(query, part)
        # Records apart from blocks: one look a run instead of one a block.
        sizes = dict(
            self._db.execute(
                "SELECT key, file_size FROM records WHERE namespace = ? AND kind = ? "
                "AND key IN (SELECT value FROM json_each(?))",
                (namespace, kind, _json_list({key for _, key, _ in blocks})),
            )
        )
        return [(digest, key, place, sizes[key]) for digest, key, place in blocks if key in sizes]

    def totals(self) -> tuple[int, int]:
        """Number of records and their bytes."""
        return self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(file_size), 0) FROM records"
        ).fetchone()

    def choose_evictions(self, quota_bytes: int) -> list[str]:
        """Keys to delete, in this order, so that the rest fits the quota.

        A snapshot goes with the run that it hangs on.
        """
        total = self.totals()[1]
        if total <= quota_bytes:
            return []
        chosen: dict[str, None] = {}
        for key, kind, size in self._db.execute(_EVICTION_ORDER, (quota_bytes,)):
            if total <= quota_bytes:
                break
            if key in chosen:
                continue
            chosen[key] = None
            total -= size
            if kind == "run":
                for snapshot, snapshot_size in self._db.execute(_HANGING_SNAPSHOTS, {"key": key}):
                    if snapshot not in chosen:
                        chosen[snapshot] = None
                        total -= snapshot_size
        return list(chosen)

    def fact(self, name: str) -> int | None:
        found = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else found[0]

    def set_fact(self, name: str, value: int) -> None:
        self._db.execute("REPLACE INTO facts VALUES (?, ?)", (name, value))

    def close(self) -> None:
        """Close every thread's connection; no thread may be inside a call."""
        for connection in list(self._open):
            connection.db.close()
        self._open.clear()

    @property
    def _db(self) -> sqlite3.Connection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _Connection(self.path)
            self._open.add(connection)
        return connection.db

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")


def is_full(error: Exception) -> bool:
    """Whether SQLite found no room on the volume. Its own complaints carry a code, those of
    Python's module do not."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _json_list(keys: Iterable[str]) -> str:
    return json.dumps(list(keys))
