"""Loads that failed, remembered: a broken bundle is refused at once instead of read again.

A failure stands for a pause, or until the model's files are other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from osaurus.errors import BundleError, OsaurusError

#: Names, sizes and times of a model's files.
Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """Why a model could not be loaded, and the files as they were then."""

    error: OsaurusError
    retry_at_s: float
    stamp: Stamp


class LoadFailures:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, LoadFailure] = {}

    def check(self, model_id: str, stamp: Stamp) -> None:
        """Raises the last failure again while its pause lasts and the files are the same."""
        failure = self._failures.get(model_id)
        if failure is not None and self._clock() < failure.retry_at_s and failure.stamp == stamp:
            raise failure.error.with_traceback(None)

    def note(self, model_id: str, error: OsaurusError, stamp: Stamp, pause_s: float) -> None:
        self._failures.pop(model_id, None)  # the newest comes last
        self._failures[model_id] = LoadFailure(
            error=_detached(error), retry_at_s=self._clock() + pause_s, stamp=stamp
        )

    def forget(self, model_id: str) -> None:
        self._failures.pop(model_id, None)

    def is_broken(self, model_id: str, path: Path) -> bool:
        """Whether the files as they are could not be loaded, for a reason of their own."""
        failure = self._failures.get(model_id)
        if failure is None or not isinstance(failure.error, BundleError):
            return False
        return failure.stamp == stamp_of(path)

    def messages(self) -> Mapping[str, str]:
        """Why each model failed, in one line, oldest first."""
        return {name: failure.error.message for name, failure in self._failures.items()}


def stamp_of(path: Path) -> Stamp:
    """Equal while nothing was changed."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return ()  # unreadable now; a change that makes it readable gives another stamp
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _detached(error: OsaurusError) -> OsaurusError:
    """The error without the frames that raised it: they hold half a model's memory."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
