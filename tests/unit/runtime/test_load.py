"""Proves where a loaded model's reusable prefixes go on disk, and which names lead to a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from osaurus.errors import ModelNotFound
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.types.cache import CacheConfig, KVMode
from osaurus.types.engine import EngineConfig
from unit.bundle.made import write_folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path))
    return tmp_path


def _options(disk_dir: Path | None = None, **fields: bool) -> LoadOptions:
    cache = CacheConfig(disk_dir=disk_dir, kv_mode=KVMode("affine", 8, 64))
    return LoadOptions(engine=EngineConfig(max_batch_size=3, cache=cache), **fields)


def test_the_users_cache_directory_is_the_default(home: Path) -> None:
    assert LoadOptions().resolved_engine().cache.disk_dir == home / "cache" / "kv"
    assert list(home.iterdir()) == []


def test_a_given_directory_wins(tmp_path: Path) -> None:
    assert _options(tmp_path / "x").resolved_engine().cache.disk_dir == tmp_path / "x"


def test_without_the_disk_cache_no_directory_is_named(tmp_path: Path) -> None:
    for given in (None, tmp_path / "x"):
        assert _options(given, disk_cache=False).resolved_engine().cache.disk_dir is None


def test_every_other_setting_stays() -> None:
    engine = _options().resolved_engine()
    assert (engine.max_batch_size, engine.cache.kv_mode) == (3, KVMode("affine", 8, 64))


def test_a_model_served_by_its_path_stays_known_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(tmp_path / "models"))
    folder = write_folder(tmp_path / "elsewhere" / "made")
    source = BundleSource(LoadOptions(default_model=str(folder)))
    with pytest.raises(ModelNotFound):
        source.find("made", allow_paths=False)
    for name in (str(folder), "", "made", "MADE"):
        assert source.find(name, allow_paths=name == str(folder)).path == folder
    assert "made" in [one.model_id for one in source.catalog()]
    with pytest.raises(ModelNotFound):
        source.find(str(tmp_path / "elsewhere"), allow_paths=False)
