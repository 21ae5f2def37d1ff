"""Proves what happens to the file: read, kept, put aside, replaced at once, migrated once."""

from __future__ import annotations

import json
import plistlib
import threading
from pathlib import Path
from typing import Any

import pytest

from osaurus.errors import InvalidField
from osaurus.settings.files import SettingsFileError, without_value
from osaurus.settings.load import Flag, assign
from osaurus.settings.migrate import RETIRED_BATCH_KEY, first_document, migrate, read_legacy
from osaurus.settings.schema import BY_KEY
from osaurus.settings.store import SettingsStore

CAPACITY = "concurrency.maxConcurrentSequences"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "server-runtime.json"


def _store(path: Path, **more: Any) -> SettingsStore:
    return SettingsStore(path, **{"environment": {}, "legacy": {}, **more})


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))


def test_without_a_file_a_fresh_one_is_assumed_and_none_is_written(path: Path) -> None:
    settings = _store(path).load()
    assert (settings[CAPACITY], settings.origin(CAPACITY)) == ("auto", "default")
    assert not path.parent.exists()


def test_a_fresh_file_says_auto_and_only_its_owner_reads_it(path: Path) -> None:
    store = _store(path)
    store.create()
    assert json.loads(path.read_text())["concurrency"] == {"maxConcurrentSequences": "auto"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert store.snapshot().origin(CAPACITY) == "file"
    before = path.read_text()
    _write(path, {"network": {"port": 5}})
    store.create()
    assert json.loads(path.read_text()) == {"network": {"port": 5}} != before


def test_a_null_or_absent_capacity_is_the_profiles(path: Path) -> None:
    for document in ({}, {"concurrency": {"maxConcurrentSequences": None}}):
        _write(path, document)
        assert _store(path).load()[CAPACITY] is None


def test_unknown_keys_survive_a_save(path: Path) -> None:
    mine = {"network": {"prt": 1, "port": 5}, "mine": {"deep": {"x": [1, None]}}, "note": "é"}
    _write(path, mine)
    store = _store(path)
    store.save(assign(store.document, BY_KEY["network.port"], 6))
    assert json.loads(path.read_text()) == {**mine, "network": {"prt": 1, "port": 6}}
    assert path.read_text().startswith('{\n  "mine"')


@pytest.mark.parametrize("text", ["{", "", "[1]", '"x"', "[" * 100_000, "\x00\xff"])
def test_a_corrupt_file_is_put_aside_whole_and_defaults_hold(path: Path, text: str) -> None:
    _write(path, text)
    store = _store(path, legacy={RETIRED_BATCH_KEY: 9})
    settings = store.load()
    aside = [one for one in path.parent.iterdir() if ".corrupt-" in one.name]
    assert [one.read_text() for one in aside] == [text]
    assert not path.exists()
    assert aside[0].name in settings.notices[0]
    assert settings[CAPACITY] == "auto"  # the retired key is read only where no file was


def test_a_wrong_value_is_an_error_and_the_file_stays(path: Path) -> None:
    _write(path, {"network": {"port": 0}})
    with pytest.raises(InvalidField, match=str(path)):
        _store(path).load()
    assert json.loads(path.read_text()) == {"network": {"port": 0}}


def test_a_save_that_is_refused_writes_nothing(path: Path) -> None:
    store = _store(path)
    store.create()
    before = path.read_text()
    for document in ({"network": {"port": 0}}, {"cache": {"liveKVCodec": "turboquant"}}):
        with pytest.raises(InvalidField):
            store.save(document)
    assert path.read_text() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_place_that_cannot_be_written_is_said_and_is_no_reason_not_to_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = _store(tmp_path / "file" / "server-runtime.json")
    store.create()
    assert "no settings file was made" in caplog.text
    with pytest.raises(SettingsFileError, match="cannot be"):
        store.save({})


def test_a_changed_file_is_seen_and_a_wrong_one_changes_nothing(path: Path) -> None:
    _write(path, {"network": {"port": 5}})
    store = _store(path)
    assert store.snapshot()["network.port"] == 5
    _write(path, {"network": {"port": 66}})
    assert store.snapshot()["network.port"] == 66
    _write(path, {"network": {"port": 777777}})
    assert store.snapshot()["network.port"] == 66
    assert "network.port" in store.problem
    _write(path, {"network": {"port": 7}})
    assert store.snapshot()["network.port"] == 7
    assert store.problem == ""


def test_an_unchanged_file_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(path, {})
    store = _store(path)
    first = store.snapshot()
    monkeypatch.setattr(store, "_read", lambda: pytest.fail("was read"))
    assert store.snapshot() is first


def test_an_override_lives_in_memory_only(path: Path) -> None:
    store = _store(path, flags={"network.port": Flag(name="--port", value=3)})
    store.create()
    before = path.read_text()
    assert store.override_in_memory({"network": {"port": 4}})["network.port"] == 4
    assert store.is_overridden
    with pytest.raises(InvalidField):
        store.override_in_memory({"network": {"port": 0}})
    assert store.snapshot().origin("network.port") == "override"
    assert store.override_in_memory(None)["network.port"] == 3
    assert (store.is_overridden, path.read_text()) == (False, before)


def test_an_override_outlives_a_change_of_the_file(path: Path) -> None:
    _write(path, {})
    store = _store(path)
    store.override_in_memory({"network": {"port": 4}})
    _write(path, {"network": {"port": 5, "host": "localhost"}})
    assert store.snapshot()["network.port"] == 4
    assert store.snapshot()["network.host"] == "localhost"


def test_readers_see_the_old_or_the_new_file_never_half(path: Path) -> None:
    store = _store(path)
    store.create()
    wrong: list[Exception] = []

    def read() -> None:
        for _ in range(200):
            try:
                json.loads(path.read_text())
            except Exception as error:  # noqa: BLE001 - told to the test
                wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for port in range(1, 60):
        store.save(assign(store.document, BY_KEY["network.port"], port))
    reader.join()
    assert wrong == []


def test_the_retired_key_is_imported_once_and_never_again(path: Path) -> None:
    legacy = {RETIRED_BATCH_KEY: 3}
    store = _store(path, legacy=legacy)
    assert store.load()[CAPACITY] == 3
    store.create()
    store.save(assign(store.document, BY_KEY[CAPACITY], None))
    assert _store(path, legacy={RETIRED_BATCH_KEY: 7}).load()[CAPACITY] is None
    store.save(first_document())  # a reset
    assert store.snapshot()[CAPACITY] == "auto"


@pytest.mark.parametrize(
    ("value", "capacity"), [(99, 32), (0, "auto"), (-1, "auto"), ("4", "auto"), (True, "auto")]
)
def test_a_retired_value_is_clamped_or_ignored(value: Any, capacity: int | str) -> None:
    document = first_document({RETIRED_BATCH_KEY: value})
    assert document["concurrency"]["maxConcurrentSequences"] == capacity


def test_the_originals_files_are_read_and_their_defaults_mean_unset(tmp_path: Path) -> None:
    preferences = tmp_path / "Library/Preferences"
    preferences.mkdir(parents=True)
    (preferences / "com.dinoki.osaurus.plist").write_bytes(plistlib.dumps({RETIRED_BATCH_KEY: 6}))
    old = {"port": 4000, "genTopP": 1.0, "exposeToNetwork": True, "allowedOrigins": ["http://a"]}
    (tmp_path / "server.json").write_text(json.dumps(old))
    document = first_document(read_legacy(tmp_path, tmp_path))
    assert document["concurrency"]["maxConcurrentSequences"] == 6
    assert document["network"] == {
        "port": 4000,
        "expose": True,
        "host": "0.0.0.0",
        "corsOrigins": ["http://a"],
    }
    assert "generation" not in document
    assert read_legacy(tmp_path / "nowhere", tmp_path / "nowhere") == {}
    (tmp_path / "server.json").write_text('{"port": "x", "genTopP": 0.9}')
    assert first_document(read_legacy(tmp_path, tmp_path))["generation"] == {"topP": 0.9}
    stored = {"modelIdleResidencyPolicy": {"mode": "after_seconds", "seconds": 1}}
    assert first_document(stored)["residency"] == {"mode": "after_seconds", "seconds": 30.0}


def test_an_older_file_is_migrated_once_and_a_later_choice_survives(path: Path) -> None:
    old = {
        "schemaVersion": 1,
        "cache": {
            "blockDisk": {"maxSizeGB": 10, "maxSizePercent": 33},
            "prefix": {"memoryPercent": 15},
            "pagedKV": {"enabled": True, "blockSize": 16},
        },
        "mtp": {"mode": "off"},
        "mine": 1,
    }
    _write(path, old)
    settings = _store(path).load()
    assert settings["cache.blockDisk.maxSizeGB"] is None
    assert settings["cache.blockDisk.maxSizePercent"] == 10.0
    assert settings["cache.prefix.memoryPercent"] is None
    assert settings["cache.pagedKV.enabled"] is None
    assert settings["mtp.mode"] == "family_default"
    assert len(settings.notices) == 6  # five steps, and the key that nobody knows
    saved = json.loads(path.read_text())
    assert (saved["schemaVersion"], saved["mine"]) == (3, 1)
    store = _store(path)
    for key, value in (
        ("cache.prefix.memoryPercent", 15),
        ("cache.pagedKV.enabled", True),
        ("mtp.mode", "off"),
        ("cache.blockDisk.maxSizePercent", 33),
    ):
        store.save(assign(store.document, BY_KEY[key], value))
    again = _store(path).load()
    assert again["cache.prefix.memoryPercent"] == 15
    assert again["mtp.mode"] == "off"
    assert again["cache.pagedKV.enabled"] is True
    assert len(again.notices) == 1


def test_what_a_person_wrote_or_chose_is_not_migrated() -> None:
    by_hand = {"mtp": {"mode": "off"}, "cache": {"pagedKV": {"enabled": True}}}
    assert migrate(by_hand) == (by_hand, [])
    chosen = {"schemaVersion": 3, "mtp": {"mode": "off", "user_chose": True}}
    assert migrate(chosen)[0]["mtp"]["mode"] == "off"


def test_taking_a_value_out_takes_empty_objects_with_it() -> None:
    document = {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
    assert without_value(document, ("a", "b", "c")) == {"a": {"d": 2}, "e": 3}
    assert without_value(document, ("a", "x", "c")) == document
    assert without_value(document, ("e", "x")) == document
