"""Keys are kept as hashes, judged in one way, and heeded when the file changes."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from osaurus.errors import InvalidField
from osaurus.settings.files import SettingsFileError
from osaurus.settings.keys import ApiKey, KeyRing, judge, seal


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "config" / "api-keys.json")


def test_a_key_opens_and_only_its_hash_is_on_disk(ring: KeyRing) -> None:
    key, text = ring.create("laptop")
    assert judge(text, ring.keys, None) == "valid"
    assert judge(text[:-1], ring.keys, None) == "unknown"
    assert text not in ring.path.read_text()
    assert ring.path.stat().st_mode & 0o077 == 0
    assert key.hash == seal(text)


def test_a_revoked_and_an_expired_key_are_told_apart(ring: KeyRing) -> None:
    key, text = ring.create("a")
    ring.revoke(key.id)
    assert judge(text, ring.keys, None) == "revoked"
    old = ApiKey(
        id="1",
        name="b",
        hash=seal("old"),
        created_at="2020-01-01T00:00:00+00:00",
        expires_at="2020-01-02T00:00:00+00:00",
    )
    assert judge("old", [old], None) == "expired"
    assert old.verdict(datetime(2020, 1, 1, 12, tzinfo=UTC)) == "valid"


def test_the_configured_key_is_a_further_one(ring: KeyRing) -> None:
    ring.create("a")
    assert judge("sesame", ring.keys, seal("sesame")) == "valid"
    assert judge(seal("sesame"), ring.keys, seal("sesame")) == "unknown"


def test_another_process_sees_the_change(ring: KeyRing) -> None:
    assert list(ring.keys) == []
    _, text = KeyRing(ring.path).create("later")
    assert judge(text, ring.keys, None) == "valid"


def test_a_damaged_file_lets_nobody_in(ring: KeyRing) -> None:
    _, text = ring.create("a")
    rows = json.loads(ring.path.read_text())
    rows["keys"][0]["hash"] = text
    ring.path.write_text(json.dumps(rows))
    with pytest.raises(SettingsFileError, match="osaurus keys create"):
        _ = ring.keys


def test_wrong_names_times_and_ids_are_refused(ring: KeyRing) -> None:
    for name, days in (("", None), ("x" * 81, None), ("a", 0.0), ("a", float("inf"))):
        with pytest.raises(InvalidField):
            ring.create(name, days=days)
    with pytest.raises(InvalidField, match="osaurus keys list"):
        ring.revoke("none")
