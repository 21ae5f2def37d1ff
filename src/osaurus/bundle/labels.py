"""Short names of how a model's weights are stored, for lists and ids: `Q4_1`, `BF16`, `4-bit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from osaurus.bundle.encodings import GGUF_FILE_TYPES
from osaurus.bundle.gguf_files import GgufSet
from osaurus.bundle.gguf_reader import GgufFile
from osaurus.bundle.safetensors_reader import WeightPlan

_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "FP8",
}


def gguf_label(one: GgufSet, file: GgufFile) -> str:
    """The file name's word, else the metadata's, else what most bytes are stored as."""
    if one.label:
        return one.label
    file_type = file.metadata.get("general.file_type")
    if file_type in GGUF_FILE_TYPES:
        return GGUF_FILE_TYPES[file_type]
    stored: Counter[str] = Counter()
    for tensor in file.tensors.values():
        stored[tensor.type.name] += tensor.num_bytes
    return stored.most_common(1)[0][0] if stored else ""


def safetensors_label(config: Mapping[str, Any], plan: WeightPlan | None = None) -> str:
    """The declared quantization, else the declared dtype, else what most bytes are stored as."""
    if (declared := _declared_quantization(config)) is not None:
        return declared
    if plan is not None and plan.tensors:
        stored: Counter[str] = Counter()
        for tensor in plan.tensors.values():
            stored[tensor.dtype] += tensor.end - tensor.begin
        return stored.most_common(1)[0][0]
    dtype = config.get("dtype") or config.get("torch_dtype")
    return _DTYPES.get(str(dtype), str(dtype).upper() if dtype else "")


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether weights are quantized as MLX does it, which names no method."""
    entry = _quantization_entry(config)
    return entry is not None and entry.get("quant_method") in (None, "mlx")


def _quantization_entry(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    # MLX writes both keys with the same content; `quant_method` tells the others apart.
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, Mapping) else {}):
        entry = place.get("quantization_config") or place.get("quantization")
        if isinstance(entry, Mapping):
            return entry
    return None


def _declared_quantization(config: Mapping[str, Any]) -> str | None:
    entry = _quantization_entry(config)
    if entry is None:
        return None
    method, bits = entry.get("quant_method"), entry.get("bits")
    mode = entry.get("mode")
    if isinstance(mode, str) and mode != "affine":
        return mode.upper()
    if method == "compressed-tensors":
        return _compressed_label(entry)
    if isinstance(algorithm := entry.get("quant_algo"), str):
        return algorithm
    if isinstance(bits, int):
        return f"{bits}-bit {method}" if isinstance(method, str) else f"{bits}-bit"
    return str(method) if method else None


def _compressed_label(entry: Mapping[str, Any]) -> str:
    """`4-bit compressed-tensors`, bits those of the first group of modules."""
    groups = entry.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
    return f"{bits}-bit compressed-tensors" if isinstance(bits, int) else "compressed-tensors"
