"""The signature of a thinking block: opaque to clients, which send it back as they got it.

An HMAC of the text under a key of this install. Nothing here verifies one: thinking that a
client changed is the client's own affair. It is there because clients expect a value that is
not empty, and it tells this install's blocks from anybody else's.
"""

from __future__ import annotations

import base64
import hmac
import logging
import os
import secrets
from pathlib import Path

logger = logging.getLogger(__name__)

_KEY_BYTES = 32


class ThinkingSigner:
    """Makes the key's file when the first block is signed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: bytes | None = None

    def begin(self) -> Signature:
        if self._key is None:
            self._key = _key_at(self._path)
        return Signature(self._key)


class Signature:
    """Of one block, whose text comes in pieces."""

    def __init__(self, key: bytes) -> None:
        self._hmac = hmac.new(key, digestmod="sha256")

    def add(self, text: str) -> None:
        self._hmac.update(text.encode("utf-8", "surrogatepass"))

    def text(self) -> str:
        return base64.b64encode(self._hmac.digest()).decode()


def _key_at(path: Path) -> bytes:
    """The key that is kept there, made if there is none. One that cannot be kept lasts as long
    as this process."""
    try:
        return _kept_key(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("the key for signatures was not read: %s", error)
        return secrets.token_bytes(_KEY_BYTES)
    key = secrets.token_bytes(_KEY_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole from its first moment: another server of this install may look at it.
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return _kept_key(path)
        finally:
            temporary.unlink()
    except (OSError, ValueError) as error:
        logger.warning("the key for signatures was not kept: %s", error)
    return key


def _kept_key(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{path} holds {len(key)} bytes instead of {_KEY_BYTES}")
    return key
