"""The device under an engine: having it for oneself, and telling when it is gone."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

#: How torch begins the messages of errors after which a device answers nothing any more; those
#: that older versions raise as plain RuntimeErrors.
_LOST_WORDS = ("CUDA error", "cuDNN error", "HIP error")

_ACCELERATOR_ERROR: type[Exception] | None = getattr(torch, "AcceleratorError", None)


class OwnDevice:
    """Implements `types.engine.DeviceSeat` for an engine that shares its device with nobody."""

    @contextmanager
    def hold(self, meanwhile: Callable[[], bool]) -> Generator[bool]:
        yield True

    def nudge(self) -> None:
        pass


def is_device_lost(error: BaseException) -> bool:
    """Whether an error in a forward says that no later forward can succeed. Running out of
    memory does not: the request that asked for it ends, and the others go on."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if _ACCELERATOR_ERROR is not None and isinstance(error, _ACCELERATOR_ERROR):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(_LOST_WORDS)
