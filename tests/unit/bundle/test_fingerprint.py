"""Proves that a model's identity changes whenever its stored keys and values would be wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.fingerprint import model_identity
from osaurus.bundle.safetensors_reader import INDEX_NAME
from unit.bundle.made import gguf_metadata, write_folder, write_gguf

SHARD = "model-00002-of-00002.safetensors"


def _touch(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def _edit_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 9.0}))


def _edit_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + " ")


def _download_again(folder: Path) -> None:
    """The same bytes, written anew."""
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    shutil.rmtree(folder)
    shutil.copytree(kept, folder, copy_function=shutil.copyfile)


@pytest.mark.parametrize(
    "change",
    [
        _edit_config,
        _edit_tokenizer,
        _download_again,
        lambda folder: (folder / "chat_template.jinja").write_text("other"),
        lambda folder: _touch(folder / SHARD),
        lambda folder: _touch(folder / INDEX_NAME),
    ],
    ids=["config", "tokenizer", "download again", "template", "weight file", "weight index"],
)
def test_every_change_of_the_model_changes_its_identity(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    folder = write_folder(tmp_path / "made", num_shards=2)
    before = model_identity(open_bundle(folder))
    assert model_identity(open_bundle(folder)) == before
    change(folder)
    assert model_identity(open_bundle(folder)) != before


def test_what_is_no_part_of_the_model_leaves_its_identity(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made")
    before = model_identity(open_bundle(folder))
    config = folder / "config.json"
    (folder / "README.md").write_text("words")
    config.write_text(json.dumps(json.loads(config.read_text()), indent=7))
    assert model_identity(open_bundle(folder)) == before


def test_a_gguf_is_known_by_its_header_and_its_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "made.gguf")
    before = model_identity(open_bundle(path))
    _touch(path)
    touched = model_identity(open_bundle(path))
    stat = path.stat()
    write_gguf(path, gguf_metadata(arch__rope__freq_base=5.0))
    assert path.stat().st_size == stat.st_size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert len({before, touched, model_identity(open_bundle(path))}) == 3


def test_the_identity_names_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made")
    name, _, digits = model_identity(open_bundle(folder, "me/made:Q4")).partition("@")
    assert name == "me/made:Q4"
    assert len(digits) == 32
    assert name != model_identity(open_bundle(folder, "me/other")).partition("@")[0]
