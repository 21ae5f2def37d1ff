"""What a list says about a model without opening it: family, size, context, and what is wrong.

In: a folder or a set of GGUF files. Out: a `Description`. Reads headers and small files only, no
torch and no tokenizer, and turns every reason why the model cannot be opened into a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from osaurus.bundle.config import missing_tokenizer_file, read_config
from osaurus.bundle.embedding import is_embedding_folder
from osaurus.bundle.gguf_config import config_from_gguf, gguf_architecture
from osaurus.bundle.gguf_files import GgufSet, open_gguf_set
from osaurus.bundle.gguf_names import missing_tensors
from osaurus.bundle.gguf_reader import GgufFile
from osaurus.bundle.labels import gguf_label, safetensors_label
from osaurus.bundle.manifest import check_manifest
from osaurus.bundle.safetensors_reader import plan_weights
from osaurus.errors import BundleError, IncompleteBundle

_WEIGHTS = ("*.safetensors", "*.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Facts that are unknown because of `problem` are empty or zero."""

    path: Path
    format: Literal["gguf", "safetensors"]
    family: str
    size_bytes: int
    quantization: str
    context: int
    modified: datetime
    problem: str | None
    is_embedder: bool = False


def describe_folder(folder: Path) -> Description:
    """A folder with `config.json` and safetensors, or what it lacks for that."""
    config: Mapping[str, Any] = {}
    problem, label = None, ""
    try:
        check_manifest(folder)
        config = read_config(folder)
        label = safetensors_label(config)
        if (missing := missing_tokenizer_file(folder)) is not None:
            raise IncompleteBundle(f"{folder / missing}: the tokenizer is missing")
        label = safetensors_label(config, plan_weights(folder))
    except BundleError as error:
        problem = error.message
    files = [path for path in folder.glob("*.safetensors") if path.is_file()]
    return Description(
        path=folder,
        format="safetensors",
        family=str(config.get("model_type", "")),
        size_bytes=sum(path.stat().st_size for path in files),
        quantization=label,
        context=context_of(config),
        modified=_modified(files or [folder]),
        problem=problem,
        is_embedder=is_embedding_folder(folder, config),
    )


def describe_gguf(one: GgufSet) -> Description:
    config: Mapping[str, Any] = {}
    family, problem, label = "", None, one.label
    try:
        check_manifest(one.path.parent)
        files = open_gguf_set(one)
        family = str(files[0].metadata.get("general.architecture", ""))
        label = gguf_label(one, files[0])
        config = config_from_gguf(files[0])
        _check_whole(files, config)
    except BundleError as error:
        problem = error.message
    present = [part for part in one.parts if part.is_file()]
    return Description(
        path=one.path,
        format="gguf",
        family=family,
        size_bytes=one.size_bytes,
        quantization=label,
        context=context_of(config),
        modified=_modified(present or [one.path.parent]),
        problem=problem,
    )


def _check_whole(files: tuple[GgufFile, ...], config: Mapping[str, Any]) -> None:
    names = [name for file in files for name in file.tensors]
    architecture = gguf_architecture(files[0])
    if lacking := missing_tensors(architecture, config["num_hidden_layers"], names):
        raise IncompleteBundle(f"{files[0].path}: the tensor {lacking[0]!r} is missing")


def context_of(config: Mapping[str, Any]) -> int:
    """Positions the model was made for, by whichever name its family uses; 0 when unknown."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, Mapping) else {}):
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
            if isinstance(value := place.get(name), int):
                return value
    return 0


def stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when any file that a description reads does; costs one directory listing."""
    entries = []
    for path in _files(folder):
        try:
            stat = path.stat()
        except OSError:  # a dangling link, as an unfinished download leaves
            continue
        entries.append((path.name, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(entries))


def _files(folder: Path) -> Iterable[Path]:
    yield from folder.iterdir()
    yield from folder.glob("*/*.gguf")


def has_model_files(folder: Path, *, is_repository: bool = True) -> bool:
    """Whether a folder wants to be a language model: others are passed over, not reported.

    Adapters and image pipelines say what they are by files of their own. A repository may keep
    its GGUFs in folders of their own; in what may be an owner's folder those are repositories.
    """
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names and names & {"adapter_config.json", "model_index.json"}:
        return False
    if "config.json" in names:
        return True
    patterns = (*_WEIGHTS, "*/*.gguf") if is_repository else _WEIGHTS
    return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))


def _modified(paths: Iterable[Path]) -> datetime:
    return datetime.fromtimestamp(max(path.stat().st_mtime for path in paths), tz=UTC)
