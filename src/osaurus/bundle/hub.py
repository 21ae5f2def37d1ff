"""The models on this machine: where they lie, what they are called, which one a name means.

In: the roots of `settings/paths.py` (models folders, Hugging Face caches) and site-packages.
Out: `ModelListing`s. A model that is not whole is listed with what it lacks, never hidden. Opens
nothing and downloads nothing; no torch.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from osaurus.bundle import describe
from osaurus.bundle.describe import Description
from osaurus.bundle.gguf_files import gguf_set_of, gguf_sets
from osaurus.bundle.wheel_table import DEFAULT_MODEL, WHEEL_MODELS, find_wheel_model, installed_path
from osaurus.errors import AmbiguousModel, ModelNotFound
from osaurus.settings.paths import ModelRoot
from osaurus.settings.places import configured_model_roots

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """One model that could be loaded, or why it cannot.

    `model_id` is canonical: `ORG/REPO` for safetensors, `ORG/REPO:QUANT` for a GGUF. `path` is
    what `open_bundle` takes. `context` is in tokens, 0 when unknown.
    """

    model_id: str
    path: Path
    format: Literal["gguf", "safetensors"]
    family: str
    size_bytes: int
    quantization: str
    context: int
    modified: datetime
    available: bool
    problem: str | None
    is_embedder: bool = False

    @property
    def repo_id(self) -> str:
        return self.model_id.partition(":")[0]

    @property
    def alias(self) -> str:
        """The short name: the repository without its owner, in lower case."""
        return self.repo_id.rpartition("/")[2].lower().replace(" ", "-")


def list_models(roots: Sequence[ModelRoot] | None = None) -> list[ModelListing]:
    """Every model found, by id; of two with one id the first root's wins.

    `roots` default to those of settings and environment; models in site-packages come last.
    """
    found: dict[str, ModelListing] = {}
    for listing in _all(roots):
        found.setdefault(listing.model_id.lower(), listing)
    return sorted(found.values(), key=lambda listing: listing.model_id.lower())


def find_model(
    name: str, roots: Sequence[ModelRoot] | None = None, *, allow_paths: bool = True
) -> ModelListing:
    """The model that `name` means; the listing may be of an unavailable one.

    In this order, without regard to case: canonical id, id without its quantization (the
    preferred one), short alias, a built-in alias such as `default` (also for an empty name), a
    path to a folder or `.gguf` file. Pass `allow_paths=False` for names from the network.
    Raises `AmbiguousModel` with the candidates, or `ModelNotFound` with what to do.
    """
    if allow_paths and (listing := _by_path(name, explicit_only=True)) is not None:
        return listing
    models = list_models(roots)
    wanted = (name.strip() or "default").lower()
    entry = find_wheel_model(wanted)
    for candidates in (
        [m for m in models if m.model_id.lower() == wanted],
        [m for m in models if m.repo_id.lower() == wanted],
        [m for m in models if wanted in _aliases(m)],
        [m for m in models if entry and m.model_id.lower() == entry.model_id.lower()],
        [m for m in models if entry and m.repo_id.lower() == entry.repo_id.lower()],
    ):
        if candidates:
            return _only_one(name, candidates)
    if allow_paths and (listing := _by_path(name, explicit_only=False)) is not None:
        return listing
    if allow_paths and looks_like_path(name):
        raise ModelNotFound(name, "there is neither a folder nor a .gguf file at that path")
    raise ModelNotFound(name or "default", _hint(wanted, models))


def looks_like_path(name: str) -> bool:
    """Whether `name` can be nothing but a path, be something there or not."""
    return name.startswith((".", "~", os.sep)) or Path(name).is_absolute()


def is_path(name: str) -> bool:
    """Whether `name` means a model by its path, which another program's server does not take."""
    if _by_path(name, explicit_only=True) is not None:
        return True
    try:
        find_model(name, allow_paths=False)
    except AmbiguousModel:
        return False
    except ModelNotFound:
        return _by_path(name, explicit_only=False) is not None
    return False


def _aliases(listing: ModelListing) -> tuple[str, ...]:
    quantization = listing.model_id.partition(":")[2].lower()
    return (listing.alias, f"{listing.alias}:{quantization}" if quantization else "")


def _only_one(name: str, candidates: list[ModelListing]) -> ModelListing:
    """Several quantizations of one repository are a preference, several repositories are not."""
    if len({listing.repo_id.lower() for listing in candidates}) > 1:
        raise AmbiguousModel(name, sorted(listing.model_id for listing in candidates))
    whole = [listing for listing in candidates if listing.available] or candidates
    full = [listing for listing in whole if listing.format == "safetensors"]
    if full:
        return full[0]
    order = {one.path: rank for rank, one in enumerate(gguf_sets(_repository(whole[0])))}
    return min(whole, key=lambda listing: order.get(listing.path, len(order)))


def _repository(listing: ModelListing) -> Path:
    return listing.path if listing.path.is_dir() else listing.path.parent


def _hint(wanted: str, models: list[ModelListing]) -> str:
    entry = find_wheel_model(wanted)
    if entry is not None:
        name = "default" if entry is DEFAULT_MODEL else entry.model_id
        return f"get it with `osaurus pull {name}`"
    names = {alias: m.model_id for m in models for alias in (m.alias, m.model_id.lower())}
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.75)
    if close:
        return f"did you mean {names[close[0]]!r}? `osaurus list` shows every model"
    if wanted.count("/") == 1:
        return f"get it with `osaurus pull {wanted}`"
    return (
        "`osaurus list` shows every model; `osaurus pull ORG/REPO` gets one from the hub and "
        "`osaurus pull default` the built-in one"
    )


def _by_path(name: str, *, explicit_only: bool) -> ModelListing | None:
    """A path: one that looks like it at once, any other only after the ids."""
    if not name.strip() or (explicit_only and not looks_like_path(name)):
        return None
    path = Path(name).expanduser()
    if path.is_file():
        one = gguf_set_of(path)
        return _listing(one.name, describe.describe_gguf(one))
    if not path.is_dir():
        return None
    found = list(_in_folder(path, path.resolve().name))
    if found:
        return _only_one(name, found)
    return _listing(path.resolve().name, describe.describe_folder(path))


def _all(roots: Sequence[ModelRoot] | None) -> Iterator[ModelListing]:
    seen: set[Path] = set()
    for root in configured_model_roots() if roots is None else roots:
        real = root.path.resolve()
        if real in seen or not real.is_dir():
            continue
        seen.add(real)
        if root.layout == "folders":
            yield from _in_models_folder(root.path)
        yield from _in_hub_cache(root.path)
    for entry in WHEEL_MODELS:
        if (path := installed_path(entry)) is not None:
            yield _listing(entry.model_id, _description(path))


def _description(path: Path) -> Description:
    """Of a GGUF, or of the folder that a file of weights lies in."""
    if path.suffix.lower() == ".gguf":
        return describe.describe_gguf(gguf_set_of(path))
    return describe.describe_folder(path.parent)


def _in_models_folder(root: Path) -> Iterator[ModelListing]:
    """`ORG/REPO/`, `REPO/` or a single `.gguf` file."""
    for entry in _visible(root):
        if entry.is_file():
            if entry.suffix.lower() == ".gguf":
                one = gguf_set_of(entry)
                yield _listing(one.name, describe.describe_gguf(one))
        elif entry.name.startswith("models--"):
            continue  # a Hugging Face cache laid over a models folder: read as such
        elif not (inside := _visible(entry)):
            continue
        elif describe.has_model_files(entry, is_repository=False):
            yield from _in_folder(entry, entry.name)
        else:
            for repository in filter(Path.is_dir, inside):
                if _visible(repository) and describe.has_model_files(repository):
                    yield from _in_folder(repository, f"{entry.name}/{repository.name}")


def _in_hub_cache(root: Path) -> Iterator[ModelListing]:
    """`models--ORG--REPO/snapshots/REV`, the revision being what `refs/main` names."""
    for entry in _visible(root):
        if not entry.name.startswith("models--") or not entry.is_dir():
            continue
        model_id = entry.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = _snapshot(entry, model_id)
        if snapshot is not None:
            yield from _in_folder(snapshot, model_id)


def _snapshot(repository: Path, model_id: str) -> Path | None:
    """What `refs/main` names, else the newest snapshot that is whole, else the newest."""
    snapshots = repository / "snapshots"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    if revision and (snapshots / revision).is_dir():
        named = snapshots / revision
        return named if describe.has_model_files(named) else None
    newest_first = sorted(
        (path for path in _visible(snapshots) if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    candidates = [path for path in newest_first if describe.has_model_files(path)]
    for path in candidates:
        if any(listing.available for listing in _in_folder(path, model_id)):
            return path
    return candidates[0] if candidates else None


def _in_folder(folder: Path, repo_id: str) -> Iterator[ModelListing]:
    """The folder's safetensors model and each of its GGUFs; a folder with GGUFs needs no other."""
    for suffix, description in _descriptions.of(folder):
        yield _listing(f"{repo_id}:{suffix}" if suffix else repo_id, description)


def _listing(model_id: str, facts: Description) -> ModelListing:
    return ModelListing(
        model_id=model_id,
        path=facts.path,
        format=facts.format,
        family=facts.family,
        size_bytes=facts.size_bytes,
        quantization=facts.quantization,
        context=facts.context,
        modified=facts.modified,
        available=facts.problem is None,
        problem=facts.problem,
        is_embedder=facts.is_embedder,
    )


def _visible(folder: Path) -> list[Path]:
    """Entries in order, without hidden ones and dangling links. A folder that may not be read
    is reported and counts as empty: the others are still of use."""
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.exists())
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("%s: not searched for models: %s", folder, error.strerror)
        return []


class _Descriptions:
    """Remembers what a folder held while its files stay the same.

    The lock keeps two listings from reading the same headers; a server lists often.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, list[tuple[str, Description]]]] = {}
        self._lock = threading.Lock()

    def of(self, folder: Path) -> list[tuple[str, Description]]:
        """Pairs of an id's suffix (empty for safetensors) and the description."""
        with self._lock:
            stamp = describe.stamp(folder)
            known = self._known.get(folder)
            if known is None or known[0] != stamp:
                known = self._known[folder] = (stamp, list(self._read(folder)))
            return known[1]

    def _read(self, folder: Path) -> Iterator[tuple[str, Description]]:
        sets = gguf_sets(folder)
        if not sets or any(folder.glob("*.safetensors")):
            yield "", describe.describe_folder(folder)
        taken: set[str] = set()
        for one in sets:
            description = describe.describe_gguf(one)
            suffix = description.quantization or one.name
            if suffix in taken:  # two files of one quantization: the name tells them apart
                suffix = one.name
            taken.add(suffix)
            yield suffix, description


_descriptions = _Descriptions()
