"""What other programs ask of a model's files: parameters, digest, licence, shape.

In: where a model lies. Out: a `ModelCard`, remembered while the files stay the same. Reads
headers and small files only. A model that is not whole has a card with what could be read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from osaurus.bundle.config import read_config
from osaurus.bundle.describe import context_of
from osaurus.bundle.encodings import SAFETENSORS_BITS
from osaurus.bundle.gguf_config import config_from_gguf
from osaurus.bundle.gguf_files import gguf_set_of, open_gguf_set
from osaurus.bundle.labels import gguf_label, safetensors_label
from osaurus.bundle.safetensors_reader import SafetensorsTensor, plan_weights
from osaurus.bundle.wheel_table import WHEEL_MODELS
from osaurus.errors import BundleError

_MAX_LICENCE_BYTES = 64 * 1024
_WEIGHTS = ("*.safetensors", "*.gguf", "*.json")

#: Beside quantized codes; they are no parameters of their own.
_NOT_PARAMETERS = re.compile(
    r"(.*\.)?(scales|biases|qzeros|g_idx|input_scale|weight_(scale|zero|shape|g_idx|global)\w*)"
)
_PACKED = frozenset({"I32", "U32", "U8", "I8"})
_MXFP4_BITS = 4

#: `model_info` keys behind the architecture's name, by the config's published spelling.
_SHAPE = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """`digest` is 64 hexadecimal digits that change when the files do; no weight is read for
    it. `info` has GGUF's names for a model's facts, whatever format it is stored in."""

    digest: str
    format: Literal["gguf", "safetensors", ""] = ""
    family: str = ""
    quantization: str = ""
    num_parameters: int = 0
    licence: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)


def card_of(model_id: str, path: Path) -> ModelCard:
    """The card of the model that `open_bundle` opens at `path`. Blocks; safe from any thread."""
    return _cards.of(model_id, path)


def parameter_label(count: int) -> str:
    """`134.5M`; empty for none."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count) if count else ""


class _Cards:
    """The lock keeps two lists from reading the same headers."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Path], ModelCard] = {}
        self._lock = threading.Lock()

    def of(self, model_id: str, path: Path) -> ModelCard:
        with self._lock:
            digest = _digest(model_id, path)
            card = self._known.get((model_id, path))
            if card is None or card.digest != digest:
                card = self._known[model_id, path] = _read(path, digest)
            return card


_cards = _Cards()


def _digest(model_id: str, path: Path) -> str:
    """Over name, size and time of every file that the model is made of."""
    facts: list[tuple[str, int, int]] = []
    for file in sorted(_files(path)):
        try:
            stat = file.stat()
        except OSError:  # a dangling link, as an unfinished download leaves
            continue
        facts.append((file.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps([model_id, facts]).encode()).hexdigest()


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return gguf_set_of(path).parts
    return [file for pattern in _WEIGHTS for file in path.glob(pattern)]


def _read(path: Path, digest: str) -> ModelCard:
    try:
        return _folder_card(path, digest) if path.is_dir() else _gguf_card(path, digest)
    except BundleError:
        return ModelCard(digest=digest)


def _gguf_card(path: Path, digest: str) -> ModelCard:
    one = gguf_set_of(path)
    files = open_gguf_set(one)
    metadata = files[0].metadata
    family = str(metadata.get("general.architecture", ""))
    count = sum(math.prod(tensor.dims) for file in files for tensor in file.tensors.values())
    config = config_from_gguf(files[0])
    info = {
        **_info(family, count, config),
        **{
            key: value
            for key, value in metadata.items()
            if isinstance(value, (str, int, float, bool)) and not key.endswith("chat_template")
        },
    }
    declared = metadata.get("general.license")
    return ModelCard(
        digest=digest,
        format="gguf",
        family=family,
        quantization=gguf_label(one, files[0]),
        num_parameters=count,
        licence=_licence(path.parent, declared) or _wheels_licence(path),
        info=info,
    )


def _folder_card(path: Path, digest: str) -> ModelCard:
    config = read_config(path)
    plan = plan_weights(path)
    family = str(config.get("model_type", ""))
    count = _num_parameters(plan.tensors, config)
    return ModelCard(
        digest=digest,
        format="safetensors",
        family=family,
        quantization=safetensors_label(config, plan),
        num_parameters=count,
        licence=_licence(path, config.get("license")),
        info=_info(family, count, config),
    )


def _info(family: str, count: int, config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    text = {**(nested if isinstance(nested, Mapping) else {}), **config}
    info: dict[str, Any] = {"general.architecture": family, "general.parameter_count": count}
    if context := context_of(config):
        info[f"{family}.context_length"] = context
    for name, key in _SHAPE.items():
        if isinstance(value := text.get(key), (int, float)):
            info[f"{family}.{name}"] = value
    return info


def _num_parameters(tensors: Mapping[str, SafetensorsTensor], config: Mapping[str, Any]) -> int:
    entry = config.get("quantization") or config.get("quantization_config") or {}
    bits = entry.get("bits") if isinstance(entry, Mapping) else None
    bits = bits if isinstance(bits, int) and bits > 0 else _MXFP4_BITS
    total = 0
    for name, tensor in tensors.items():
        if _NOT_PARAMETERS.fullmatch(name) or name.endswith("_scales"):
            continue
        count = math.prod(tensor.shape)
        if entry and tensor.dtype in _PACKED:
            count = count * int(SAFETENSORS_BITS[tensor.dtype]) // bits
        total += count
    return total


def _licence(folder: Path, declared: object) -> str:
    """The text that lies beside the model, else its name."""
    for path in sorted(folder.glob("LICENSE*")):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(_MAX_LICENCE_BYTES).decode(errors="replace")
    return declared if isinstance(declared, str) else ""


def _wheels_licence(path: Path) -> str:
    found = (entry.licence for entry in WHEEL_MODELS if entry.file_name == path.name)
    return next(found, "")
