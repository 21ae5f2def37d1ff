"""Deleting models: their files in the models directory, and nothing beside or behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from osaurus.bundle.hub import ModelListing, list_models
from osaurus.bundle.removal import remove_model
from osaurus.errors import InvalidField
from osaurus.settings.paths import ModelRoot
from unit.bundle.made import write_folder, write_gguf


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("osaurus.bundle.hub.installed_path", lambda _: None)
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def _found(folder: Path) -> dict[str, ModelListing]:
    root = ModelRoot(layout="folders", path=folder, reason="test")
    return {one.model_id: one for one in list_models([root])}


def _remove(models: Path, model_id: str) -> None:
    remove_model(model_id, _found(models)[model_id].path, models)


def test_a_folder_goes_with_its_owner_where_that_has_no_other(models: Path) -> None:
    write_folder(models / "Org" / "A")
    write_folder(models / "Org" / "B")
    _remove(models, "Org/A")
    assert sorted(_found(models)) == ["Org/B"]
    assert not (models / "Org" / "A").exists()
    _remove(models, "Org/B")
    assert list(models.iterdir()) == []


def test_of_several_quantizations_one_goes(models: Path) -> None:
    for quantization in ("Q4_0", "Q8_0"):
        write_gguf(models / "Org" / "M" / f"m-{quantization}.gguf", encoding=quantization)
    (models / "Org" / "M" / "README.md").write_text("about")
    _remove(models, "Org/M:Q4_0")
    assert sorted(_found(models)) == ["Org/M:Q8_0"]
    assert (models / "Org" / "M" / "README.md").exists()
    _remove(models, "Org/M:Q8_0")
    assert list(models.iterdir()) == []


def test_safetensors_beside_ggufs_go_alone(models: Path) -> None:
    write_folder(models / "M")
    write_gguf(models / "M" / "m-Q8_0.gguf", encoding="Q8_0")
    _remove(models, "M")
    assert sorted(_found(models)) == ["M:Q8_0"]


def test_a_single_file_and_one_in_a_folder_below_go(models: Path) -> None:
    write_gguf(models / "lone-Q8_0.gguf", encoding="Q8_0")
    write_gguf(models / "Org" / "M" / "Q8_0" / "m-Q8_0.gguf", encoding="Q8_0")
    for model_id in sorted(_found(models)):
        _remove(models, model_id)
    assert list(models.iterdir()) == []


def test_what_lies_elsewhere_is_not_deleted(models: Path, tmp_path: Path) -> None:
    elsewhere = write_folder(tmp_path / "other" / "Org" / "M")
    with pytest.raises(InvalidField, match="does not lie in the models directory"):
        remove_model("Org/M", elsewhere, models)
    with pytest.raises(InvalidField, match="does not lie in the models directory"):
        remove_model("M", models / ".." / "other" / "Org" / "M", models)
    with pytest.raises(InvalidField, match="does not lie in the models directory"):
        remove_model("models", models, models)
    assert (elsewhere / "config.json").exists()


def test_a_hugging_face_cache_in_the_directory_is_left_alone(models: Path) -> None:
    snapshot = write_folder(models / "models--Org--M" / "snapshots" / "abc")
    with pytest.raises(InvalidField, match="hf cache rm"):
        remove_model("Org/M", snapshot, models)
    assert (snapshot / "config.json").exists()


@pytest.mark.parametrize("place", ["Org/M", "Org"])
def test_links_are_not_followed(models: Path, tmp_path: Path, place: str) -> None:
    real = write_folder(tmp_path / "real" / "Org" / "M")
    link = models / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "real" / place)
    with pytest.raises(InvalidField, match="reached by a link"):
        _remove(models, "Org/M")
    assert (real / "config.json").exists()
    assert link.is_symlink()


def test_links_inside_a_folder_go_and_what_they_lead_to_stays(models: Path, tmp_path: Path) -> None:
    folder = write_folder(models / "M")
    other = tmp_path / "precious"
    other.mkdir()
    (other / "file").write_text("x")
    (folder / "sub").symlink_to(other)
    _remove(models, "M")
    assert not folder.exists()
    assert (other / "file").exists()
