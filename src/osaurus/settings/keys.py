"""API keys: which ones open this server, kept as their hashes only.

    config/api-keys.json   {"keys": [{id, name, hash, created_at, expires_at, revoked_at}, …]}

A key is 256 random bits, so that a plain SHA-256 of it tells nothing; it is shown once, when it
is made. `network.apiKey` is one more key, kept the same way. The file is looked at again when
it has changed: no restart is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from osaurus.errors import InvalidField
from osaurus.settings.files import SettingsFileError, read_document, stamp, write_document

Verdict = Literal["valid", "unknown", "expired", "revoked"]

_PREFIX = "osk-"
_SEALED = re.compile(r"sha256:[0-9a-f]{64}")


def seal(key: str) -> str:
    """What is kept of a key; what is sealed already stays as it is."""
    if _SEALED.fullmatch(key):
        return key
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """Times are ISO 8601 in UTC; an empty one is none."""

    id: str
    name: str
    hash: str
    created_at: str
    expires_at: str = ""
    revoked_at: str = ""

    def verdict(self, now: datetime) -> Verdict:
        if self.revoked_at:
            return "revoked"
        if self.expires_at and datetime.fromisoformat(self.expires_at) <= now:
            return "expired"
        return "valid"


class KeyRing:
    """The keys in the file at `path`. Any thread may ask; each change is one atomic write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._keys: tuple[ApiKey, ...] = ()

    @property
    def keys(self) -> Sequence[ApiKey]:
        """As the file says now. Raises `SettingsFileError` when it cannot be read: a server
        whose keys are unknown lets nobody in."""
        found = stamp(self.path)
        if found != self._stamp:
            document, notice = read_document(self.path)
            if notice:
                raise SettingsFileError(notice)
            self._keys = _parsed(self.path, document or {})
            self._stamp = found
        return self._keys

    def create(self, name: str, *, days: float | None = None) -> tuple[ApiKey, str]:
        """A new key and its text, which nothing remembers. Raises `InvalidField`."""
        if not name.strip() or len(name) > 80:
            raise InvalidField("name", "must have 1 to 80 characters")
        if days is not None and not 0 < days <= 36_500:
            raise InvalidField("days", f"must be more than 0 and at most 36500, got {days:g}")
        now = datetime.now(UTC)
        text = _PREFIX + secrets.token_urlsafe(32)
        key = ApiKey(
            id=secrets.token_hex(4),
            name=name.strip(),
            hash=seal(text),
            created_at=now.isoformat(timespec="seconds"),
            expires_at=(
                "" if days is None else (now + timedelta(days=days)).isoformat(timespec="seconds")
            ),
        )
        self._write([*self.keys, key])
        return key, text

    def revoke(self, key_id: str) -> ApiKey:
        """Raises `InvalidField` for an id that no key has."""
        keys = list(self.keys)
        for i, key in enumerate(keys):
            if key.id == key_id:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                keys[i] = replace(key, revoked_at=key.revoked_at or now)
                self._write(keys)
                return keys[i]
        raise InvalidField("id", f"no key has the id {key_id[:40]!r}; see `osaurus keys list`")

    def _write(self, keys: Sequence[ApiKey]) -> None:
        write_document(self.path, {"keys": [asdict(key) for key in keys]})


def judge(given: str, keys: Sequence[ApiKey], configured: str | None) -> Verdict:
    """What `given` is worth. `configured` is the sealed `network.apiKey`. Takes the same time
    whichever key it is, and whether it is one."""
    sealed = hashlib.sha256(given.encode(errors="surrogateescape")).hexdigest()
    sealed = f"sha256:{sealed}"
    now = datetime.now(UTC)
    found: Verdict = "unknown"
    for key in keys:
        if hmac.compare_digest(key.hash, sealed):
            found = key.verdict(now)
    if configured is not None and hmac.compare_digest(configured, sealed):
        found = "valid"
    return found


def _parsed(path: Path, document: Mapping[str, Any]) -> tuple[ApiKey, ...]:
    rows = document.get("keys", [])
    try:
        keys = tuple(ApiKey(**row) for row in rows)
        for key in keys:
            key.verdict(datetime.now(UTC))
            if not _SEALED.fullmatch(key.hash):
                raise ValueError("a hash is none")
    except (TypeError, ValueError) as error:
        raise SettingsFileError(
            f"{path}: is no list of keys ({error}); mend it, or delete it and make new ones "
            "with `osaurus keys create`"
        ) from None
    return keys
