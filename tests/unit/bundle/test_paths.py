"""Every place on disk, as a function of the environment alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from osaurus.settings import paths
from osaurus.settings.paths import all_places, model_roots, models_dir

HOME = {"HOME": "/h"}


def where(name: str, env: dict[str, str]) -> tuple[str, str]:
    place = getattr(paths, name)({**HOME, **env})
    return str(place.path), place.reason


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("home", "/h/.osaurus"),
        ("config_dir", "/h/.osaurus/config"),
        ("server_settings", "/h/.osaurus/config/server-runtime.json"),
        ("cache_dir", "/h/.osaurus/cache"),
        ("kv_cache_dir", "/h/.osaurus/cache/kv"),
        ("runtime_dir", "/h/.osaurus/runtime"),
        ("plugins_dir", "/h/.osaurus/plugins"),
        ("logs_dir", "/h/.osaurus/logs"),
        ("proof_dir", "/h/.osaurus/proof"),
        ("models_dir", "/h/.osaurus/models"),
    ],
)
def test_everything_lies_in_the_home_by_default_and_moves_with_it(name: str, path: str) -> None:
    assert where(name, {}) == (path, "the default")
    xdg = dict.fromkeys(("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"), "/xdg")
    moved = where(name, {"OSAURUS_HOME": "/o", **xdg})
    assert moved == (path.replace("/h/.osaurus", "/o"), "OSAURUS_HOME")


@pytest.mark.parametrize(
    ("name", "variable", "path"),
    [
        ("config_dir", "XDG_CONFIG_HOME", "/x/osaurus"),
        ("server_settings", "XDG_CONFIG_HOME", "/x/osaurus/server-runtime.json"),
        ("cache_dir", "XDG_CACHE_HOME", "/x/osaurus"),
        ("kv_cache_dir", "XDG_CACHE_HOME", "/x/osaurus/kv"),
        ("runtime_dir", "XDG_STATE_HOME", "/x/osaurus/runtime"),
        ("logs_dir", "XDG_STATE_HOME", "/x/osaurus/logs"),
    ],
)
def test_an_xdg_directory_that_is_set_is_used_alone(name: str, variable: str, path: str) -> None:
    assert where(name, {variable: "/x"}) == (path, variable)
    for ignored in ("", "  ", "relative/dir"):
        assert where(name, {variable: ignored})[1] == "the default"


@pytest.mark.parametrize("variable", ["OSAURUS_MODELS_DIR", "OSU_MODELS_DIR"])
def test_the_models_folder_follows_either_variable(variable: str) -> None:
    assert where("models_dir", {variable: "/m"}) == ("/m", variable)
    assert where("models_dir", {variable: "~/m"}) == ("/h/m", variable)
    assert where("models_dir", {variable: os.pathsep.join(("/m", "/n"))}) == ("/m", variable)
    both = {"OSAURUS_MODELS_DIR": "/a", "OSU_MODELS_DIR": "/b"}
    assert where("models_dir", both) == ("/a", "OSAURUS_MODELS_DIR")


def test_a_configured_models_folder_yields_to_the_environment() -> None:
    assert models_dir(HOME, Path("/c")).path == Path("/c")
    assert models_dir({**HOME, "OSAURUS_MODELS_DIR": "/m"}, Path("/c")).path == Path("/m")


@pytest.mark.parametrize(
    ("env", "path"),
    [
        ({}, "/h/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/f"}, "/f/hub"),
        ({"HF_HOME": "/f", "HF_HUB_CACHE": "/c"}, "/c"),
        ({"HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
    ],
)
def test_the_hubs_cache_is_where_its_library_puts_it(env: dict[str, str], path: str) -> None:
    assert where("hub_cache_dir", env)[0] == path


def test_roots_come_in_the_promised_order_and_once_each() -> None:
    env = {
        **HOME,
        "OSAURUS_MODELS_DIR": os.pathsep.join(("/m1", "/m2", "/m1")),
        "HF_HUB_CACHE": "/c",
        "HF_HOME": "/f",
    }
    roots = model_roots(env, extra=[Path("/extra")], hub_caches=[Path("/custom"), Path("/f/hub")])
    assert [(root.layout, str(root.path)) for root in roots] == [
        ("folders", "/m1"),
        ("folders", "/m2"),
        ("folders", "/extra"),
        ("folders", "/h/MLXModels"),
        ("hub", "/custom"),
        ("hub", "/f/hub"),
        ("hub", "/c"),
        ("hub", "/h/.cache/huggingface/hub"),
    ]


def test_every_place_has_a_name_and_a_reason_and_nothing_is_created(tmp_path: Path) -> None:
    places = all_places({"HOME": str(tmp_path)})
    assert len({place.name for place in places}) == len(places) == 13
    assert all(place.reason for place in places)
    assert list(tmp_path.iterdir()) == []
