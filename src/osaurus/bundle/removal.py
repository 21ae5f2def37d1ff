"""Delete a model from the models directory: its files there, and nothing else.

In: a model as it was found. Refused: whatever lies outside of the directory that osaurus owns, in
a Hugging Face cache, or behind a link, since that belongs to somebody else.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from osaurus.bundle.gguf_files import gguf_set_of
from osaurus.bundle.safetensors_reader import INDEX_NAME
from osaurus.errors import DownloadError, InvalidField


def remove_model(model_id: str, path: Path, models_dir: Path) -> None:
    """`path` is what `open_bundle` takes. Raises `InvalidField` for a model that is not ours to
    delete, and `DownloadError` where the disk refuses."""
    check_owned(model_id, path, models_dir)
    repository = models_dir.joinpath(*model_id.partition(":")[0].split("/"))
    try:
        if path.is_dir():
            _remove_folder(path)
        else:
            for part in gguf_set_of(path).parts:
                part.unlink(missing_ok=True)
            if path.parent not in (models_dir, repository):
                with suppress(OSError):  # other quantizations lie there
                    path.parent.rmdir()
        if repository.is_dir() and not repository.is_symlink() and not _has_weights(repository):
            shutil.rmtree(repository)
        for folder in repository.parents:
            if folder == models_dir:
                break
            with suppress(OSError):  # other models lie there
                folder.rmdir()
    except OSError as error:
        raise DownloadError(
            f"{model_id} could not be deleted: {error.filename or path}: {error.strerror}"
        ) from error


def check_owned(model_id: str, path: Path, models_dir: Path) -> None:
    """Raises `InvalidField` for a model that is not ours to delete."""
    try:
        inside = path.relative_to(models_dir)
    except ValueError:
        inside = Path()
    if not inside.parts or ".." in inside.parts or inside.parts[0].startswith("models--"):
        raise InvalidField(
            "model",
            f"{model_id} does not lie in the models directory ({models_dir}) and is not deleted; "
            "remove it where it came from, from a Hugging Face cache with `hf cache rm`",
        )
    place = models_dir
    for part in inside.parts:
        place = place / part
        if place.is_symlink():
            raise InvalidField(
                "model", f"{model_id} is reached by a link ({place}), which is not followed"
            )


def _remove_folder(folder: Path) -> None:
    """The safetensors model of a folder; GGUFs that lie there too are other models."""
    if not any(folder.glob("*.gguf")) and not any(folder.glob("*/*.gguf")):
        shutil.rmtree(folder)
        return
    for path in (*folder.glob("*.safetensors"), folder / INDEX_NAME):
        path.unlink(missing_ok=True)


def _has_weights(folder: Path) -> bool:
    return any(
        path.is_file()
        for pattern in ("*.safetensors", "*.gguf", "*/*.gguf")
        for path in folder.glob(pattern)
    )
