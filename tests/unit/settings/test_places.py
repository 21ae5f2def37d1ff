"""Proves that the settings say where models lie, and that a wrong file moves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from osaurus.bundle.hub import list_models
from osaurus.settings.places import configured_model_roots, configured_models_dir


def _home(tmp_path: Path, text: str) -> dict[str, str]:
    folder = tmp_path / "config"
    folder.mkdir(exist_ok=True)
    (folder / "server-runtime.json").write_text(text)
    return {"OSAURUS_HOME": str(tmp_path), "HOME": str(tmp_path)}


def _models(**models: object) -> str:
    return json.dumps({"models": models})


def test_the_file_names_the_directory_and_the_environment_wins(tmp_path: Path) -> None:
    env = _home(tmp_path, _models(directory="/mine"))
    assert configured_models_dir(env).path == Path("/mine")
    assert configured_models_dir({**env, "OSAURUS_MODELS__DIRECTORY": "/x"}).path == Path("/x")
    assert configured_models_dir({**env, "OSAURUS_MODELS_DIR": "/first"}).path == Path("/first")


def test_further_folders_and_caches_are_searched_in_their_order(tmp_path: Path) -> None:
    env = _home(
        tmp_path, _models(directory="/mine", extraDirectories=["/a", "/b"], hubCaches=["/hub"])
    )
    roots = [(root.layout, str(root.path)) for root in configured_model_roots(env)]
    wanted = [("folders", "/mine"), ("folders", "/a"), ("folders", "/b"), ("hub", "/hub")]
    assert [root for root in roots if root in wanted] == wanted


@pytest.mark.parametrize("text", ["{", "[]", _models(directory=3), _models(extraDirectories="/a")])
def test_a_wrong_file_moves_nothing_and_stays(tmp_path: Path, text: str) -> None:
    env = _home(tmp_path, text)
    assert configured_models_dir(env).path == tmp_path / "models"
    assert len(list((tmp_path / "config").iterdir())) == 1


def test_a_model_in_a_folder_of_the_settings_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = tmp_path / "extra"
    (extra / "org/thing").mkdir(parents=True)
    (extra / "org/thing/config.json").write_text("{}")
    for name, value in _home(tmp_path, _models(extraDirectories=[str(extra)])).items():
        monkeypatch.setenv(name, value)
    assert "org/thing" in [model.model_id for model in list_models()]
