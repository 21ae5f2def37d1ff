"""How far a download is, as a value for whoever draws the bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["present", "download", "verify", "extract", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """`completed` and `total` are bytes of this stage; a `total` of 0 means unknown."""

    stage: Stage
    file: str
    completed: int = 0
    total: int = 0


#: May be called from another thread than the one that pulls.
ProgressCallback = Callable[[PullProgress], None]


def ignore_progress(progress: PullProgress) -> None:
    """For callers that draw nothing."""


#: Asked now and then by the thread that pulls: whether to give up.
IsStopped = Callable[[], bool]


def never_stopped() -> bool:
    return False
