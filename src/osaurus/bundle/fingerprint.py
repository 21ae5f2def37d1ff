"""What tells one state of a model on disk from another, without reading its weights.

In: what a bundle's small files say and where its weights lie. Out: a digest that changes
whenever the model could, and the name by which stored keys and values know their model.
Hashing gigabytes at each start would not pay: of a weight file name, size and time count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

#: Hexadecimal digits of the fingerprint in an identity: 128 bits, still readable in a log.
_IDENTITY_DIGITS = 32


class _Bundle(Protocol):
    @property
    def model_id(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def fingerprint(
    facts: Mapping[str, Any], *, read_whole: Iterable[Path], weights: Iterable[Path]
) -> str:
    """64 hexadecimal digits over `facts` (the config and what it was completed with), the
    content of the files `read_whole` (the tokenizer's), and name, size and modification time
    in nanoseconds of the files `weights` (the index among them).

    Raises `OSError` for a file that went away.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for path in read_whole:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    for path in weights:
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def model_identity(bundle: _Bundle) -> str:
    """`ORG/REPO@<fingerprint>`: the bundle's part of a cache key.

    Two models that share a token sequence must not share keys and values, and neither must a
    model and its re-download or re-quantization under the same name. The type that the keys
    and values were computed in is the engine's to add.
    """
    return f"{bundle.model_id}@{bundle.fingerprint[:_IDENTITY_DIGITS]}"
