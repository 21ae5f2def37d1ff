"""Fetch a model from the Hugging Face hub into its own cache: never a second copy.

In: `ORG/REPO` or `ORG/REPO:QUANT`. Out: the snapshot folder (or the `.gguf` in it). Chooses the
files worth fetching; transfer, resume, locks and the cache's layout are `huggingface_hub`'s,
imported when needed. What goes wrong becomes a `DownloadError` that says what to do.
"""

from __future__ import annotations

import glob
import re
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from osaurus.bundle.gguf_files import quantization_label, rank_of_label
from osaurus.bundle.progress import (
    IsStopped,
    ProgressCallback,
    PullProgress,
    ignore_progress,
    never_stopped,
)
from osaurus.bundle.resume import fetch_large_files, stoppable_bar
from osaurus.errors import Cancelled, DownloadError

_POLL_S = 0.25
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_SMALL_FILES = re.compile(
    r"[^/]+\.(json|jinja)|tokenizer\.model|spiece\.model|merges\.txt|vocab\.txt"
    r"|additional_chat_templates/[^/]+\.jinja|LICENSE[^/]*"
)
#: Beside the model: the same weights in another layout, adapters, vision projectors.
_DUPLICATES = re.compile(r"(consolidated|adapter)[._-].*|.*(mmproj|imatrix).*", re.IGNORECASE)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of the repository. `size_bytes` is 0 where the hub does not say."""

    name: str
    size_bytes: int


class Hub(Protocol):
    """The little that is needed of the hub's library; tests put a fake here."""

    def files(self, repo_id: str, revision: str | None) -> list[RemoteFile]: ...

    def fetch(
        self,
        repo_id: str,
        revision: str | None,
        names: Sequence[str],
        cache_dir: Path | None,
        is_stopped: IsStopped,
    ) -> Path:
        """Download these files, resuming what was begun; return the snapshot folder. Raises
        `Cancelled` once `is_stopped` says so, keeping what was begun."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """What a pull will fetch, for showing before it starts."""

    repo_id: str
    quantization: str
    files: tuple[RemoteFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def plan_pull(name: str, *, revision: str | None = None, hub: Hub | None = None) -> PullPlan:
    """Ask the hub what `name` consists of and choose what to fetch.

    Raises `DownloadError` for a name that is none, a repository without usable weights, a
    quantization it does not have, and when the hub cannot be reached.
    """
    repo_id, _, quantization = name.partition(":")
    if not _REPO_ID.fullmatch(repo_id):
        raise DownloadError(f"{name!r} is not a repository name such as ORG/REPO or ORG/REPO:QUANT")
    with _explained(repo_id):
        files = (hub or HuggingFaceHub()).files(repo_id, revision)
    return choose_files(repo_id, files, quantization)


def pull_hub_model(
    name: str,
    *,
    revision: str | None = None,
    progress: ProgressCallback = ignore_progress,
    cache_dir: Path | None = None,
    hub: Hub | None = None,
    is_stopped: IsStopped = never_stopped,
) -> Path:
    """Fetch the model into the Hugging Face cache and return what `open_bundle` takes.

    `cache_dir` defaults to the library's own choice (HF_HUB_CACHE, HF_HOME). May be repeated
    after an interruption. `progress` is called from another thread. Raises `Cancelled` once
    `is_stopped` says so.
    """
    hub = hub or HuggingFaceHub()
    plan = plan_pull(name, revision=revision, hub=hub)
    names = [file.name for file in plan.files]
    watched = cache_dir or _default_cache()
    with _explained(plan.repo_id), _reporting(plan, watched, progress):
        folder = hub.fetch(plan.repo_id, revision, names, cache_dir, is_stopped)
    total = plan.total_bytes
    progress(PullProgress(stage="done", file=plan.repo_id, completed=total, total=total))
    return folder / names[0] if plan.quantization else folder


def choose_files(repo_id: str, files: Sequence[RemoteFile], quantization: str) -> PullPlan:
    """Safetensors with their small files, or all parts of one GGUF; never pickles or doubles."""
    top = [f for f in files if "/" not in f.name and not _DUPLICATES.fullmatch(f.name)]
    weights = [f for f in top if f.name.endswith(".safetensors")]
    ggufs = _ggufs_by_label(files)
    if weights and not quantization:
        small = [f for f in files if _SMALL_FILES.fullmatch(f.name)]
        return PullPlan(repo_id=repo_id, quantization="", files=(*small, *weights))
    if ggufs:
        label = _choose_label(repo_id, ggufs, quantization)
        return PullPlan(repo_id=repo_id, quantization=label, files=tuple(ggufs[label]))
    if quantization:
        raise DownloadError(
            f"{repo_id} has no GGUF files, so no quantization {quantization!r}; pull {repo_id}"
        )
    if any(f.name.endswith(_PICKLED) for f in files):
        raise DownloadError(
            f"{repo_id} has pickled weights only, and loading a pickle runs whatever code is in "
            "it; look for a repository with safetensors or GGUF files"
        )
    raise DownloadError(f"{repo_id} has neither safetensors nor GGUF files")


def _ggufs_by_label(files: Sequence[RemoteFile]) -> dict[str, list[RemoteFile]]:
    """Files of each quantization; its parts in order. A file without a label goes by its stem."""
    found: dict[str, list[RemoteFile]] = {}
    for file in sorted(files, key=lambda f: f.name):
        base = file.name.rpartition("/")[2]
        if base.endswith(".gguf") and not _DUPLICATES.fullmatch(base):
            stem = _SPLIT.sub("", base.removesuffix(".gguf"))
            found.setdefault(quantization_label(stem) or stem, []).append(file)
    return found


def _choose_label(repo_id: str, ggufs: dict[str, list[RemoteFile]], wanted: str) -> str:
    if not wanted:
        return min(ggufs, key=rank_of_label)
    for label in ggufs:
        if label.lower() == wanted.lower():
            return label
    raise DownloadError(
        f"{repo_id} has no quantization {wanted!r}; it has {', '.join(sorted(ggufs))}"
    )


class HuggingFaceHub:
    """The real hub, through `huggingface_hub`."""

    def files(self, repo_id: str, revision: str | None) -> list[RemoteFile]:
        from huggingface_hub import HfApi

        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
        return [
            RemoteFile(name=file.rfilename, size_bytes=file.size or 0)
            for file in info.siblings or ()
        ]

    def fetch(
        self,
        repo_id: str,
        revision: str | None,
        names: Sequence[str],
        cache_dir: Path | None,
        is_stopped: IsStopped,
    ) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        show_again = not are_progress_bars_disabled()
        disable_progress_bars()  # the caller draws its own
        try:
            fetch_large_files(repo_id, revision, names, cache_dir or _default_cache(), is_stopped)
            folder = snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=[glob.escape(name) for name in names],
                tqdm_class=stoppable_bar(is_stopped),
            )
        finally:
            if show_again:
                enable_progress_bars()
        return Path(folder)


def _default_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


@contextmanager
def _reporting(plan: PullPlan, cache_dir: Path, progress: ProgressCallback) -> Generator[None]:
    """Report the growth of the repository's blobs, whatever way the library transfers them."""
    blobs = cache_dir / f"models--{plan.repo_id.replace('/', '--')}" / "blobs"
    before = _bytes_in(blobs, has_parts=False)  # what an earlier pull left counts as done
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_POLL_S):
            done = min(_bytes_in(blobs) - before, plan.total_bytes)
            progress(
                PullProgress(
                    stage="download",
                    file=plan.repo_id,
                    completed=max(0, done),
                    total=plan.total_bytes,
                )
            )

    thread = threading.Thread(target=watch, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _bytes_in(folder: Path, *, has_parts: bool = True) -> int:
    total = 0
    for path in folder.glob("*"):
        if not has_parts and path.suffix == ".incomplete":
            continue
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # the library renames finished files meanwhile
            continue
    return total


@contextmanager
def _explained(repo_id: str) -> Generator[None]:
    """Turn the library's errors into ours, with the remedy."""
    try:
        yield
    except (Cancelled, DownloadError):
        raise
    except Exception as error:
        message = _explanation(repo_id, error)
        if message is None:
            raise
        raise DownloadError(message) from error


def _explanation(repo_id: str, error: Exception) -> str | None:
    """None for errors that are not the hub's, the network's or the disk's: those are bugs."""
    from huggingface_hub import errors

    def is_a(*names: str) -> bool:
        kinds: list[Any] = [getattr(errors, name, ()) for name in names]
        return any(isinstance(error, kind) for kind in kinds)

    if is_a("GatedRepoError"):
        return (
            f"{repo_id} is gated: accept its terms on its page, then set HF_TOKEN or run "
            "`hf auth login`"
        )
    if is_a("RepositoryNotFoundError"):
        return (
            f"{repo_id} does not exist on the hub, or is private: check the spelling, or set "
            "HF_TOKEN"
        )
    if is_a("RevisionNotFoundError"):
        return f"{repo_id} has no such revision"
    if is_a("OfflineModeIsEnabled"):
        return f"{repo_id} cannot be fetched while HF_HUB_OFFLINE is set; unset it and pull again"
    network = type(error).__module__.partition(".")[0] in (
        "httpx",
        "httpx2",
        "httpcore",
        "requests",
    )
    if (
        network
        or is_a("HfHubHTTPError", "LocalEntryNotFoundError")
        or isinstance(error, ConnectionError)
    ):
        return (
            f"the hub could not be reached for {repo_id} ({type(error).__name__}); check the "
            "network or HF_ENDPOINT and pull again: what was fetched is kept"
        )
    if isinstance(error, OSError):
        return f"{repo_id} could not be stored: {error}"
    return None
