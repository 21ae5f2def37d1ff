"""What a bundle's weights take once loaded, from names, shapes and types alone.

The arithmetic of the forms in `quant/`: a quantized weight is kept as codes of 4 bits, or two
planes of them, beside each group's scale and offset as stored and, for torch's packed product,
a pair of bfloat16 for each plane. Native kernels keep less, so this is at most. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from osaurus.types.weights import QuantizeOnLoad, TensorFacts

#: What a plain weight becomes on load: bits, group, bytes of a group's scale and offset.
_ON_LOAD: Mapping[QuantizeOnLoad, tuple[int, int, int]] = {"int8": (8, 64, 6), "int4": (4, 32, 6)}
#: The same for GGUF's blocks. Scales that are products of two numbers are float32.
_GGUF: Mapping[str, tuple[int, int, int]] = {
    "Q4_0": (4, 32, 6),
    "Q4_1": (4, 32, 4),
    "Q5_0": (5, 32, 6),
    "Q5_1": (5, 32, 4),
    "Q8_0": (8, 32, 6),
    "IQ4_NL": (8, 32, 6),
    "Q2_K": (2, 16, 8),
    "Q3_K": (3, 16, 8),
    "Q4_K": (4, 32, 8),
    "Q5_K": (5, 32, 8),
    "Q6_K": (6, 16, 8),
}
_PLAIN = ("F32", "F16", "BF16", "F64")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
#: Names of embedding and head, which are quantized to 8 bits at least.
_ENDS = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "embedding_norm.weight")
#: Parts of a quantized matrix that hold its codes.
_CODES = ("weight", "qweight", "weight_packed", "blocks")


def loaded_bytes(
    tensors: Iterable[TensorFacts],
    config: Mapping[str, Any],
    mode: str,
    quantize: QuantizeOnLoad | None,
) -> int:
    """`mode` float32 dequantizes everything; `quantize` is what plain matrices become."""
    modules: dict[str, dict[str, TensorFacts]] = {}
    for tensor in tensors:
        path, _, part = tensor.name.rpartition(".")
        for ending in ("_blocks", "_scales"):
            if tensor.name.endswith(ending):
                path, part = tensor.name.removesuffix(ending), ending[1:]
        modules.setdefault(path, {})[part] = tensor
    entry = _quantization(config)
    total = 0.0
    for path, parts in modules.items():
        codes = next((parts[part] for part in _CODES if part in parts), None)
        quantized = None
        if codes is not None and codes.encoding not in _PLAIN and codes.encoding not in _GGUF:
            quantized = _quantized(path, codes, parts, entry)
        if quantized is not None:
            elements, form = quantized
            total += elements * (4 if mode == "float32" else _bytes_a_weight(*form))
        else:
            total += sum(_plain(tensor, mode, quantize) for tensor in parts.values())
    return int(total)


def _plain(tensor: TensorFacts, mode: str, quantize: QuantizeOnLoad | None) -> float:
    """Plain numbers or GGUF blocks. Vectors are float32."""
    elements = prod(tensor.shape)
    if mode == "float32" or len(tensor.shape) < 2:
        return 4 * elements
    form = _GGUF.get(tensor.encoding)
    if form is None and quantize is not None:
        form = _ON_LOAD["int8" if tensor.name.endswith(_ENDS) else quantize]
        if tensor.shape[-1] % form[1] or min(tensor.shape) == 1:
            form = None
    return elements * (2 if form is None else _bytes_a_weight(*form))


def _bytes_a_weight(bits: int, group: int, scale_bytes: int) -> float:
    """Worked example, 8 bits in groups of 64 with 6 bytes each: two planes of 4 bits, 14 bytes
    a group: 1.219 bytes. Codes of more than 4 bits in groups of 16 become bfloat16."""
    if bits > 8 or (bits > 4 and group == 16):
        return 2.0
    planes = 2 if bits > 4 else 1
    return planes / 2 + (4 * planes + scale_bytes) / group


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, Mapping) else {}):
        entry = place.get("quantization") or place.get("quantization_config")
        if isinstance(entry, Mapping):
            return entry
    return {}


def _quantized(
    path: str, codes: TensorFacts, parts: Mapping[str, TensorFacts], entry: Mapping[str, Any]
) -> tuple[int, tuple[int, int, int]]:
    """Weights in a module, and their form once loaded: (bits, group, bytes of scale and offset)."""
    own = entry.get(path)
    entry = {**entry, **own} if isinstance(own, Mapping) else entry
    group = entry.get("group_size")
    group = group if isinstance(group, int) and group > 0 else 128
    scales = parts.get("scales")
    if codes.encoding.startswith("F8"):
        return prod(codes.shape), (16, 1, 0)
    if codes.encoding == "U32" and scales is not None:  # MLX
        mode = entry.get("mode", "affine")
        group = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}.get(mode, group)
        elements = prod(scales.shape) * group
        bits = round(8 * codes.num_bytes / max(1, elements))
        if mode == "affine":
            item = _ITEM_BYTES.get(scales.encoding, 4)
            # Codes of fewer than 4 bits are shifted, which makes their offset float32.
            return elements, (bits, group, item + (4 if bits < 4 else item))
        return elements, (5, 32, 8) if mode == "mxfp4" else (16, 1, 0)
    if codes.encoding == "U8":  # two 4-bit floats a byte; of whole exponents or of small floats
        is_mx = "blocks" in parts or str(entry.get("format", "")).startswith("mxfp4")
        return 2 * codes.num_bytes, (5, 32, 8) if is_mx else (16, 1, 0)
    bits = entry.get("bits") or _bits_of_groups(entry)
    bits = bits if isinstance(bits, int) and 1 <= bits <= 8 else 4
    if codes.encoding == "I8":
        bits = 8
    return 8 * codes.num_bytes // bits, (bits, group, 8)


def _bits_of_groups(entry: Mapping[str, Any]) -> Any:
    """compressed-tensors: those of the first group of modules."""
    groups = entry.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights.get("num_bits") if isinstance(weights, Mapping) else None
