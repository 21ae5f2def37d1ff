"""Telling a supervisor what this process is up to, where it asked to be told (systemd's
`Type=notify` and those who do as it does): `READY=1` when requests are welcome, `STOPPING=1` when
no more should come."""

from __future__ import annotations

import logging
import os
import socket
from typing import Literal

logger = logging.getLogger(__name__)


def notify(state: Literal["READY=1", "STOPPING=1"]) -> None:
    """Send `state` to the datagram socket that NOTIFY_SOCKET names; nothing without one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address or not hasattr(socket, "AF_UNIX"):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # Linux's abstract names
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError as error:
        logger.warning("the supervisor could not be told %s: %s", state, error)
