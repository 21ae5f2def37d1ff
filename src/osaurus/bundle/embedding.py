"""What a bundle says of itself as an embedding model: how token vectors become one, how long a
text may be.

In: a folder and its config. Out: an `EmbeddingSpec`, or None for a model that writes text. The
files are sentence-transformers' (`modules.json`, `1_Pooling/config.json`,
`sentence_bert_config.json`); an encoder without them is taken too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from osaurus.bundle.config import read_optional, read_tokenizer_config
from osaurus.errors import UnsupportedBundle

Pooling = Literal["cls", "mean", "max", "last"]

#: Read text whole and write none.
ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet"})

_MODULES = "modules.json"
_MAX_BYTES = 1024 * 1024

#: A switch of a pooling module -> our word.
_SWITCHES: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
#: What tokenizers write for "no limit" is some huge number.
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """`max_tokens` is the bundle's own limit of a text, None where it names none.
    `is_normalized`: vectors have length one."""

    pooling: Pooling = "mean"
    is_normalized: bool = True
    max_tokens: int | None = None


def is_embedding_folder(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the folder's model makes vectors; says nothing of whether it is served."""
    return config.get("model_type") in ENCODERS or (folder / _MODULES).is_file()


def read_embedding_spec(folder: Path, config: Mapping[str, Any]) -> EmbeddingSpec | None:
    """Raises `UnsupportedBundle` for a way of making vectors that is not served."""
    if not is_embedding_folder(folder, config):
        return None
    limit = _limit(folder)
    if not (folder / _MODULES).is_file():
        return EmbeddingSpec(max_tokens=limit)
    pooling: Pooling | None = None
    is_normalized = False
    for kind, path in _modules(folder):
        match kind:
            case "Transformer" if path == "":
                continue
            case "Pooling":
                pooling = _pooling(folder / path / "config.json")
            case "Normalize":
                is_normalized = True
            case _:
                raise UnsupportedBundle(
                    f"{folder / _MODULES}: a module {kind!r} in {path or '.'!r} is not supported; "
                    "served are a Transformer in the folder itself, Pooling and Normalize"
                )
    if pooling is None:
        raise UnsupportedBundle(f"{folder / _MODULES}: names no Pooling, so texts have no vector")
    return EmbeddingSpec(pooling=pooling, is_normalized=is_normalized, max_tokens=limit)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Each module's kind, the last part of its class's path, and its folder, in order."""
    path = folder / _MODULES
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UnsupportedBundle(f"{path}: larger than {_MAX_BYTES} bytes")
        entries = json.loads(path.read_bytes())
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in entries]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise UnsupportedBundle(f"{path}: not a list of modules ({error!r})") from error
    for _, place in found:
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise UnsupportedBundle(f"{path}: the module path {place!r} leaves the folder")
    return found


def _pooling(path: Path) -> Pooling:
    config = read_optional(path)
    named = config.get("pooling_mode")
    wanted = [name for name, value in config.items() if value is True]
    wanted = [name for name in wanted if name.startswith("pooling_mode_")]
    if isinstance(named, str):
        wanted.append(next((s for s, word in _SWITCHES.items() if named in (word, s)), named))
        wanted = list(dict.fromkeys(wanted))
    if len(wanted) != 1 or wanted[0] not in _SWITCHES:
        raise UnsupportedBundle(
            f"{path}: pooling by {' and '.join(wanted) or 'nothing'} is not supported; served are "
            f"{', '.join(_SWITCHES)}, one at a time"
        )
    return _SWITCHES[wanted[0]]


def _limit(folder: Path) -> int | None:
    """The bundle's own limit of a text, marks at its ends included."""
    limits = [
        read_optional(folder / "sentence_bert_config.json").get("max_seq_length"),
        read_tokenizer_config(folder).get("model_max_length"),
    ]
    known = [int(n) for n in limits if isinstance(n, int | float) and 0 < n < _NO_LIMIT]
    return known[0] if known else None
