"""`osaurus cache`: what is kept of prompts on disk, and how to be rid of it.

Works on the directory itself, with or without a server that uses it: records come and go
whole, so neither gets in the other's way. Imports no torch.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyclopts import App

from osaurus.bundle.hub import find_model
from osaurus.cache.disk import DiskStore, open_existing
from osaurus.cache.index import RecordRow
from osaurus.cli.app import EXIT_FAILED, EXIT_OK
from osaurus.cli.options import Json, KvCacheDir
from osaurus.cli.terminal import columns, human_bytes, say
from osaurus.errors import ModelNotFound, OsaurusError
from osaurus.settings.paths import kv_cache_dir

cache = App(name="cache")

_MODELS_HEADER = ("MODEL", "RECORDS", "SIZE", "LAST USED")
_RECORDS_HEADER = ("KEY", "MODEL", "KIND", "TOKENS", "SIZE", "LAST USED")


@cache.command
def stats(*, directory: KvCacheDir = None, as_json: Json = False) -> None:
    """Say how much is stored, and of which models."""
    with _opened(directory) as (place, store):
        rows = [] if store is None else store.entries()
        facts: dict[str, Any] = {
            "directory": str(place),
            "records": len(rows),
            "runs": sum(row.kind == "run" for row in rows),
            "snapshots": sum(row.kind == "snapshot" for row in rows),
            "bytes": sum(row.file_size for row in rows),
            "quota_bytes": None if store is None else store.quota_bytes,
            "quarantine_bytes": 0 if store is None else store.quarantine_bytes(),
            "models": _by_model(rows),
        }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    size = human_bytes(facts["bytes"])
    if facts["quota_bytes"] is not None:
        size += f" of {human_bytes(facts['quota_bytes'])}"
    print(f"directory   {facts['directory']}")
    print(f"records     {facts['runs']} runs of blocks, {facts['snapshots']} snapshots")
    print(f"size        {size}")
    print(f"put aside   {human_bytes(facts['quarantine_bytes'])} of damaged records")
    if rows:
        print()
        print(columns(_MODELS_HEADER, (_model_row(found) for found in facts["models"])))


@cache.command(name="list")
def list_records(*, directory: KvCacheDir = None, as_json: Json = False) -> None:
    """List the records, the most recently used first."""
    with _opened(directory) as (place, store):
        rows = [] if store is None else store.entries()
    if as_json:
        print(json.dumps([_record_json(row) for row in rows], indent=2))
    elif rows:
        print(columns(_RECORDS_HEADER, (_record_row(row) for row in rows)))
    else:
        say(f"nothing is stored in {place}")


@cache.command
def clear(
    model: str | None = None, /, *, directory: KvCacheDir = None, as_json: Json = False
) -> None:
    """Delete what is stored of one model, or everything.

    Costs the time to compute it again, and nothing else.

    Parameters
    ----------
    model
        Name or alias of a model; everything when not given.
    """
    with _opened(directory) as (place, store):
        stored = set() if store is None else {row.model for row in store.entries()}
        name = None if model is None else _stored_name(model, stored)
        records, freed = (0, 0) if store is None else store.clear(model=name)
    if as_json:
        print(json.dumps({"records": records, "bytes": freed}))
    else:
        say(f"deleted {records} records, {human_bytes(freed)}, from {place}")


@cache.command
def verify(*, directory: KvCacheDir = None, as_json: Json = False) -> int:
    """Check every record; put damaged ones aside and exit with 1 if there were any."""
    with _opened(directory) as (place, store):
        report = None if store is None else store.verify()
    if report is None:
        facts: dict[str, Any] = dict.fromkeys(("checked", "bytes", "missing", "orphans"), 0)
        damaged = unreadable = ()
    else:
        damaged, unreadable = report.damaged, report.unreadable
        facts = {
            "checked": report.checked,
            "bytes": report.checked_bytes,
            "missing": report.missing,
            "orphans": report.orphans,
        }
    if as_json:
        facts["damaged"] = [{"key": key, "problem": problem} for key, problem in damaged]
        facts["unreadable"] = [{"key": key, "problem": problem} for key, problem in unreadable]
        print(json.dumps(facts, indent=2))
    else:
        for key, problem in damaged:
            print(f"{key}  damaged: {problem}")
        for key, problem in unreadable:
            print(f"{key}  cannot be read: {problem}")
        say(
            f"checked {facts['checked']} records, {human_bytes(facts['bytes'])}, in {place}: "
            f"{len(damaged)} damaged"
        )
    return EXIT_FAILED if damaged or unreadable else EXIT_OK


@contextmanager
def _opened(given: Path | None) -> Generator[tuple[Path, DiskStore | None]]:
    """The directory and what is in it, None for nothing; closed at the end."""
    place = kv_cache_dir().path if given is None else given.expanduser().absolute()
    opened = open_existing(place)
    if isinstance(opened, str):
        raise OsaurusError(opened)
    try:
        yield place, opened
    except (OSError, sqlite3.Error) as error:
        raise OsaurusError(f"{place}: {error}") from error
    finally:
        if opened is not None:
            opened.close()


def _stored_name(name: str, stored: set[str]) -> str:
    """The id under which a model's records are kept. Raises `ModelNotFound`."""
    if name in stored:
        return name
    try:
        model_id = find_model(name).model_id
    except ModelNotFound:
        model_id = name
    if model_id not in stored:
        names = ", ".join(sorted(stored)) or "nothing"
        raise ModelNotFound(name, f"the KV cache holds {names}")
    return model_id


def _by_model(rows: Iterable[RecordRow]) -> list[dict[str, Any]]:
    """Stable keys; the most recently used first, as the rows are."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        facts = found.setdefault(
            row.model, {"model": row.model, "records": 0, "bytes": 0, "last_used": ""}
        )
        facts["records"] += 1
        facts["bytes"] += row.file_size
        facts["last_used"] = max(facts["last_used"], _iso(row.last_used_at))
    return list(found.values())


def _model_row(facts: dict[str, Any]) -> tuple[str, ...]:
    used = datetime.fromisoformat(facts["last_used"]).astimezone()
    size = human_bytes(facts["bytes"])
    return (facts["model"], str(facts["records"]), size, f"{used:%Y-%m-%d %H:%M}")


def _record_json(row: RecordRow) -> dict[str, Any]:
    """Stable keys."""
    return {
        "key": row.key,
        "model": row.model,
        "kind": row.kind,
        "first_token": row.first_token,
        "end_token": row.end_token,
        "bytes": row.file_size,
        "created": _iso(row.created_at),
        "last_used": _iso(row.last_used_at),
        "namespace": row.namespace,
    }


def _record_row(row: RecordRow) -> tuple[str, ...]:
    used = datetime.fromtimestamp(row.last_used_at, UTC).astimezone()
    tokens = f"{row.first_token}-{row.end_token}" if row.kind == "run" else f"at {row.end_token}"
    size = human_bytes(row.file_size)
    return (row.key, row.model, row.kind, tokens, size, f"{used:%Y-%m-%d %H:%M}")


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
