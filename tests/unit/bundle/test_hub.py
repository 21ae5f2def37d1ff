"""Discovery: which models are on this machine, under which names, and what a name means."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import osaurus
from osaurus.bundle import hub
from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import ModelListing, find_model, list_models
from osaurus.bundle.wheel_table import DEFAULT_MODEL
from osaurus.errors import AmbiguousModel, ModelNotFound
from osaurus.settings.paths import ModelRoot
from unit.bundle.made import gguf_metadata, gguf_tensors, write_folder, write_gguf


@pytest.fixture(autouse=True)
def _nothing_in_site_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "installed_path", lambda entry: None)


def folders(path: Path) -> list[ModelRoot]:
    return [ModelRoot(layout="folders", path=path, reason="test")]


def cache(path: Path) -> list[ModelRoot]:
    return [ModelRoot(layout="hub", path=path, reason="test")]


def ids(roots: list[ModelRoot]) -> list[str]:
    return [listing.model_id for listing in list_models(roots)]


def in_cache(root: Path, name: str, revision: str, *, main: str | None = None) -> Path:
    """A snapshot as the hub's library lays it out, with its files behind links."""
    repository = root / f"models--{name}"
    snapshot = repository / "snapshots" / revision
    write_folder(repository / "blobs" / revision)
    snapshot.mkdir(parents=True)
    for file in (repository / "blobs" / revision).iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / revision / file.name)
    if main is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(main)
    return snapshot


# --- listing --------------------------------------------------------------------------------


def test_both_layouts_of_a_models_folder_are_found(tmp_path: Path) -> None:
    write_folder(tmp_path / "Org" / "Model-One")
    write_folder(tmp_path / "flat")
    write_gguf(tmp_path / "Org" / "Two-GGUF" / "Two-Q8_0.gguf", encoding="Q8_0")
    write_gguf(tmp_path / "loose-Q4_0.gguf", encoding="Q4_0")
    assert ids(folders(tmp_path)) == ["flat", "loose-Q4_0", "Org/Model-One", "Org/Two-GGUF:Q8_0"]


def test_a_listing_says_what_the_files_say(tmp_path: Path) -> None:
    path = tmp_path / "Org" / "M" / "m-Q8_0.gguf"
    write_gguf(path, encoding="Q8_0", architecture="qwen3", tensors=gguf_tensors("llama"))
    folder = write_folder(tmp_path / "Org" / "N", config={"max_position_embeddings": 4096})
    gguf, safetensors = list_models(folders(tmp_path))
    # This one lacks qwen3's own tensors: described all the same, and not available.
    assert (gguf.family, gguf.quantization, gguf.context) == ("qwen3", "Q8_0", 512)
    assert not gguf.available
    assert "attn_q_norm" in (gguf.problem or "")
    assert safetensors == ModelListing(
        model_id="Org/N",
        path=folder,
        format="safetensors",
        family="llama",
        size_bytes=(folder / "model.safetensors").stat().st_size,
        quantization="BF16",
        context=4096,
        modified=safetensors.modified,
        available=True,
        problem=None,
    )
    written = (folder / "model.safetensors").stat().st_mtime
    assert safetensors.modified.timestamp() == pytest.approx(written, abs=1e-3)
    assert open_bundle(safetensors.path, safetensors.model_id).model_id == "Org/N"


def test_each_quantization_of_a_folder_is_a_model_of_its_own(tmp_path: Path) -> None:
    for name in ("m-Q4_0", "m-Q8_0", "sub/m-F16"):
        write_gguf(tmp_path / "Org" / "M" / f"{name}.gguf")
    write_folder(tmp_path / "Org" / "M")
    assert ids(folders(tmp_path)) == ["Org/M", "Org/M:F16", "Org/M:Q4_0", "Org/M:Q8_0"]


def test_two_files_of_one_quantization_keep_names_of_their_own(tmp_path: Path) -> None:
    for name in ("a-Q4_0", "b-Q4_0"):
        write_gguf(tmp_path / "Org" / "M" / f"{name}.gguf", encoding="Q4_0")
    assert ids(folders(tmp_path)) == ["Org/M:b-Q4_0", "Org/M:Q4_0"]


def test_an_incomplete_bundle_is_listed_with_the_missing_file(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", num_shards=2)
    (tmp_path / "a" / "model-00002-of-00002.safetensors").unlink()
    write_folder(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").unlink()
    write_gguf(tmp_path / "c" / "m-Q4_0-00001-of-00002.gguf")
    problems = [listing.problem or "" for listing in list_models(folders(tmp_path))]
    missing = ["model-00002-of-00002.safetensors", "tokenizer.json", "m-Q4_0-00002-of-00002.gguf"]
    assert all(name in problem for name, problem in zip(missing, problems, strict=True))
    assert not any(listing.available for listing in list_models(folders(tmp_path)))


def test_an_unknown_gguf_architecture_is_listed_as_unavailable(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", gguf_metadata("gpt9"), {}, architecture="gpt9")
    (listing,) = list_models(folders(tmp_path))
    assert listing.family == "gpt9"
    assert "'gpt9' is not supported" in (listing.problem or "")


def test_what_is_no_language_model_is_passed_over(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "model_index.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        (folder / "weights.safetensors").write_bytes(b"")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.md").write_text("")
    (tmp_path / "file.txt").write_text("")
    write_folder(tmp_path / ".hidden")
    write_folder(tmp_path / "Org" / ".hidden")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert ids(folders(tmp_path)) == []


def test_links_are_followed_and_one_directory_is_searched_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "real" / "m")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(tmp_path / "real" / "m")
    (tmp_path / "again").symlink_to(tmp_path / "models")
    roots = [*folders(tmp_path / "models"), *folders(tmp_path / "again")]
    assert ids(roots) == ["linked"]


def test_of_two_models_with_one_id_the_first_roots_wins(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "1" / "Org" / "M")
    write_folder(tmp_path / "2" / "org" / "m")
    roots = [*folders(tmp_path / "1"), *folders(tmp_path / "2")]
    assert [listing.path for listing in list_models(roots)] == [first]


def test_a_root_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert list_models([*folders(tmp_path / "no"), *cache(tmp_path / "no")]) == []


def test_a_folder_that_may_not_be_read_is_reported_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "good")
    (tmp_path / "locked").mkdir()
    iterdir = Path.iterdir

    def guarded(path: Path) -> Iterator[Path]:
        if path.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    # Permissions themselves do not stop a test that runs as root.
    monkeypatch.setattr(Path, "iterdir", guarded)
    with caplog.at_level(logging.WARNING):
        assert ids(folders(tmp_path)) == ["good"]
    assert "locked" in caplog.text


def test_a_change_on_disk_is_seen_at_the_next_listing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    assert list_models(folders(tmp_path))[0].available
    (folder / "tokenizer.json").unlink()
    assert not list_models(folders(tmp_path))[0].available
    write_folder(tmp_path / "n")
    assert ids(folders(tmp_path)) == ["m", "n"]


def test_headers_are_not_read_again_while_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "Org" / "M" / "m-Q4_0.gguf")
    before = list_models(folders(tmp_path))

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("osaurus.bundle.describe.open_gguf_set", refuse)
    assert list_models(folders(tmp_path)) == before


# --- the hub's cache ------------------------------------------------------------------------


def test_the_revision_of_main_is_the_model(tmp_path: Path) -> None:
    in_cache(tmp_path, "Org--M", "aaa")
    wanted = in_cache(tmp_path, "Org--M", "bbb", main="bbb")
    in_cache(tmp_path, "solo", "ccc", main="ccc\n")
    found = list_models(cache(tmp_path))
    assert [listing.model_id for listing in found] == ["Org/M", "solo"]
    assert found[0].path == wanted
    assert all(listing.available for listing in found)


def test_without_main_the_newest_whole_snapshot_is_taken(tmp_path: Path) -> None:
    old, whole, broken = (in_cache(tmp_path, "Org--M", name) for name in ("a", "b", "c"))
    (broken / "model.safetensors").unlink()
    for age, snapshot in enumerate((broken, whole, old)):
        os.utime(snapshot, (1e9 - age, 1e9 - age))
    (listing,) = list_models(cache(tmp_path))
    assert listing.path == whole


def test_a_snapshot_that_lacks_its_weights_is_listed_so(tmp_path: Path) -> None:
    snapshot = in_cache(tmp_path, "Org--M", "a", main="a")
    (snapshot / "model.safetensors").unlink()
    (listing,) = list_models(cache(tmp_path))
    assert not listing.available


def test_snapshots_without_a_model_and_data_sets_are_passed_over(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Org--T" / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    (tmp_path / "datasets--Org--D" / "snapshots" / "a").mkdir(parents=True)
    (tmp_path / "models--Org--Empty").mkdir()
    assert ids(cache(tmp_path)) == []


def test_a_cache_laid_over_a_models_folder_is_read_as_a_cache(tmp_path: Path) -> None:
    in_cache(tmp_path, "Org--M", "a", main="a")
    assert ids(folders(tmp_path)) == ["Org/M"]


# --- names ----------------------------------------------------------------------------------


def test_an_id_is_found_in_any_case_and_by_its_alias(tmp_path: Path) -> None:
    write_folder(tmp_path / "Org" / "My Model")
    for name in ("Org/My Model", "org/my model", "my-model", "My-Model", "  my-model "):
        assert find_model(name, folders(tmp_path)).model_id == "Org/My Model"


def test_an_id_without_quantization_means_the_preferred_one(tmp_path: Path) -> None:
    for name in ("m-Q8_0", "m-Q4_K_M", "m-F16"):
        write_gguf(tmp_path / "Org" / "M" / f"{name}.gguf")
    roots = folders(tmp_path)
    assert find_model("org/m", roots).model_id == "Org/M:Q4_K_M"
    assert find_model("m", roots).model_id == "Org/M:Q4_K_M"
    assert find_model("m:q8_0", roots).model_id == "Org/M:Q8_0"
    assert find_model("ORG/M:f16", roots).model_id == "Org/M:F16"
    write_folder(tmp_path / "Org" / "M")
    assert find_model("m", roots).model_id == "Org/M"


def test_a_whole_quantization_is_preferred_to_a_broken_one(tmp_path: Path) -> None:
    write_gguf(tmp_path / "Org" / "M" / "m-Q8_0.gguf")
    broken = write_gguf(tmp_path / "Org" / "M" / "m-Q4_K_M.gguf")
    broken.write_bytes(broken.read_bytes()[:-100])
    assert find_model("m", folders(tmp_path)).model_id == "Org/M:Q8_0"
    assert not find_model("m:q4_k_m", folders(tmp_path)).available


def test_an_alias_of_two_models_is_ambiguous_and_names_both(tmp_path: Path) -> None:
    write_folder(tmp_path / "A" / "Model")
    write_folder(tmp_path / "B" / "model")
    with pytest.raises(AmbiguousModel) as caught:
        find_model("model", folders(tmp_path))
    assert caught.value.candidates == ["A/Model", "B/model"]
    assert find_model("b/MODEL", folders(tmp_path)).model_id == "B/model"


@pytest.mark.parametrize("name", ["default", "", "DEFAULT", "smollm2-135m-instruct"])
def test_default_means_the_built_in_model(tmp_path: Path, name: str) -> None:
    path = DEFAULT_MODEL.path_in(tmp_path)
    write_gguf(path, encoding="Q4_1")
    write_folder(tmp_path / "Other" / "Model")
    assert find_model(name, folders(tmp_path)).path == path


def test_default_is_content_with_the_same_model_from_the_hub(tmp_path: Path) -> None:
    write_folder(tmp_path.joinpath(*DEFAULT_MODEL.repo_id.split("/")))
    assert find_model("default", folders(tmp_path)).model_id == DEFAULT_MODEL.repo_id


def test_a_model_in_site_packages_is_found_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = write_gguf(tmp_path / "site" / DEFAULT_MODEL.file_name, encoding="Q4_1")
    monkeypatch.setattr(
        hub, "installed_path", lambda entry: installed if entry is DEFAULT_MODEL else None
    )
    assert find_model("default", folders(tmp_path / "models")).path == installed
    pulled = write_gguf(DEFAULT_MODEL.path_in(tmp_path / "models"), encoding="Q4_1")
    assert find_model("default", folders(tmp_path / "models")).path == pulled
    assert len(list_models(folders(tmp_path / "models"))) == 1


def test_a_path_to_a_folder_or_file_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "made")
    file = write_gguf(tmp_path / "x-Q4_0.gguf", encoding="Q4_0")
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "made", "./made"):
        assert find_model(name, []).path.resolve() == folder
    assert find_model("./made", []).model_id == "made"
    for name in (str(file), "x-Q4_0.gguf"):
        assert find_model(name, []).model_id == "x-Q4_0"


def test_an_id_wins_over_a_folder_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = write_folder(tmp_path / "models" / "made")
    write_folder(tmp_path / "here" / "made")
    monkeypatch.chdir(tmp_path / "here")
    assert find_model("made", folders(tmp_path / "models")).path == wanted


def test_names_from_the_network_are_never_paths(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made")
    for name in (str(folder), f"{folder}/../made", "~"):
        with pytest.raises(ModelNotFound):
            find_model(name, [], allow_paths=False)


def test_a_name_is_a_path_only_where_no_model_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "models" / "made")
    folder = write_folder(tmp_path / "here" / "made")
    write_folder(tmp_path / "here" / "other")
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path / "here")
    assert [hub.is_path(name) for name in (str(folder), "./made", "other")] == [True] * 3
    assert [hub.is_path(name) for name in ("made", "default", "nothing", "")] == [False] * 4


def test_a_path_without_a_model_is_listed_with_what_it_lacks(tmp_path: Path) -> None:
    listing = find_model(str(tmp_path), [])
    assert not listing.available
    assert "config.json" in (listing.problem or "")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("default", "osaurus pull default"),
        ("huggingfacetb/smollm2-135m-instruct", "osaurus pull default"),
        ("Org/Unknown", "osaurus pull org/unknown"),
        ("my-modle", "did you mean 'Org/My-Model'"),
        ("xyz", "osaurus list"),
        ("./gone", "neither a folder nor a .gguf file at that path"),
    ],
)
def test_a_name_that_is_not_found_says_what_to_do(tmp_path: Path, name: str, hint: str) -> None:
    write_folder(tmp_path / "Org" / "My-Model")
    with pytest.raises(ModelNotFound) as caught:
        find_model(name, folders(tmp_path))
    assert hint in caught.value.message


def test_listing_is_light(default_model_path: Path) -> None:
    program = (
        "import sys\n"
        "from osaurus.bundle.hub import list_models\n"
        "assert any(m.available for m in list_models())\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'jinja2', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(osaurus.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
