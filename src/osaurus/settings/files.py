"""The settings file as it lies on disk: nested JSON objects, read and written whole.

Knows no setting: keys that nobody knows pass through as they are.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from osaurus.errors import OsaurusError

Document = dict[str, Any]

#: Larger than any honest file of settings.
_MAX_BYTES = 1 << 20


class SettingsFileError(OsaurusError):
    """The file cannot be read or written; the message says why and where."""

    code = "settings_file_error"


def read_document(path: Path) -> tuple[Document | None, str]:
    """The file's content, None where there is no file, and a notice, empty as a rule.

    A file that holds no JSON object is renamed, so that it can be looked at and nothing writes
    over it; the notice says what it is called now. Raises `SettingsFileError`.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None, _set_aside(path, f"larger than {_MAX_BYTES} bytes")
        data = path.read_bytes()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        raise SettingsFileError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        return None, _set_aside(path, str(error))
    if not isinstance(document, dict):
        return None, _set_aside(path, "it holds no JSON object")
    return document, ""


def peek_document(path: Path) -> Document:
    """The same without a change on disk; empty for what cannot be read."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replace the file at once: whoever reads it sees the old or the new one, whole. For its
    owner only, since it may hold a key. Raises `SettingsFileError`."""
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # mkstemp makes a file that nobody else may read.
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SettingsFileError(f"{path}: cannot be written: {error.strerror}") from error


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def find(document: Mapping[str, Any], path: Sequence[str]) -> tuple[bool, Any]:
    """Whether the key is there, and what it holds."""
    found: Any = document
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return False, None
        found = found[name]
    return True, found


def with_value(document: Mapping[str, Any], path: Sequence[str], value: Any) -> Document:
    """A copy that holds `value` there; what stood in the way and was no object is replaced."""
    changed = deepcopy(dict(document))
    place = changed
    for name in path[:-1]:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    place[path[-1]] = list(value) if isinstance(value, tuple) else value
    return changed


def without_value(document: Mapping[str, Any], path: Sequence[str]) -> Document:
    """A copy without the key and without the objects that are empty for it."""
    changed = deepcopy(dict(document))
    places = [changed]
    for name in path[:-1]:
        if not isinstance(places[-1].get(name), dict):
            return changed
        places.append(places[-1][name])
    places[-1].pop(path[-1], None)
    for place, name in zip(reversed(places[:-1]), reversed(path[:-1]), strict=True):
        if not place[name]:
            del place[name]
    return changed


def leaves(document: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> list[str]:
    """The dotted keys of everything that is no object."""
    keys: list[str] = []
    for name, value in document.items():
        path = (*prefix, name)
        keys += leaves(value, path) if isinstance(value, dict) and value else [".".join(path)]
    return keys


def _set_aside(path: Path, why: str) -> str:
    aside = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
    try:
        path.rename(aside)
    except OSError as error:
        raise SettingsFileError(
            f"{path}: cannot be understood ({why}) nor put aside: {error.strerror}"
        ) from error
    return f"{path}: cannot be understood ({why}); it is now {aside.name}, and defaults hold"
