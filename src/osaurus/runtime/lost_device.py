"""A device that answers nothing any more: told apart from a model or a request that failed.

After some errors (an illegal address, a device-side assertion) every later call to a CUDA device
fails, for as long as the process lives: no engine and no model can be had there again.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from osaurus.errors import DeviceLost


@contextmanager
def telling_a_lost_device(device: str) -> Generator[None]:
    """Raises `DeviceLost` in place of an error of the device that it does not recover from;
    every other error as it is."""
    try:
        yield
    except RuntimeError as error:
        from osaurus.engine.device import is_device_lost

        if is_device_lost(error) and not answers(device):
            reason = str(error).partition("\n")[0]
            raise DeviceLost(device, reason) from error
        raise


def answers(device: str) -> bool:
    """Asks the device for something small. One without such a state always answers."""
    if not device.startswith("cuda"):
        return True
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
