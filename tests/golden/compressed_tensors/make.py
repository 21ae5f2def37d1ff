"""Writes what the compressed-tensors package makes of small weights.

    python make.py FILE      with a Python that has `compressed-tensors`

`matrices.safetensors` beside this file was made so, by compressed-tensors 0.20: each form's
parts, `<form>.dequantized` in float32, and the forms' config groups in the metadata.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

N, K = 16, 32
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4-group": ("pack-quantized", dict(num_bits=4, strategy="group", group_size=32)),
    "int4-zero": (
        "pack-quantized",
        dict(num_bits=4, strategy="group", group_size=16, symmetric=False),
    ),
    "int8-channel": ("pack-quantized", dict(num_bits=8, strategy="channel")),
    "int8-plain": ("int-quantized", dict(num_bits=8, strategy="channel")),
    "fp8-tensor": ("float-quantized", dict(num_bits=8, type="float", strategy="tensor")),
    "fp8-channel": ("float-quantized", dict(num_bits=8, type="float", strategy="channel")),
    "fp8-block": (
        "float-quantized",
        dict(num_bits=8, type="float", strategy="block", block_structure=[8, 16]),
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        dict(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        dict(num_bits=4, type="float", strategy="group", group_size=32),
    ),
}


def scale_shape(form: dict[str, Any]) -> tuple[int, ...]:
    if form["strategy"] == "tensor":
        return (1,)
    if form["strategy"] == "channel":
        return (N, 1)
    if form["strategy"] == "block":
        rows, columns = form["block_structure"]
        return (N // rows, K // columns)
    return (N, K // form["group_size"])


def main(path: str) -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    groups: dict[str, Any] = {}
    for name, (kind, form) in FORMS.items():
        scheme = QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(**form), format=kind
        )
        top = 6.0 if "fp4" in name else 448.0 if "fp8" in name else 2 ** (form["num_bits"] - 1)
        scale = (0.5 + torch.rand(scale_shape(form))) / top
        state = {"weight": torch.randn(N, K) * 0.3, "weight_scale": scale}
        if name == "nvfp4":
            state["weight_global_scale"] = torch.tensor([900.0])
            state["weight_scale"] = (scale * 900).to(torch.float8_e4m3fn).float()
        if name == "mxfp4":
            state["weight_scale"] = torch.exp2(scale.log2().floor())
        if form.get("symmetric") is False:
            zeros = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
            state["weight_zero_point"] = zeros
        compressor: Any = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        wanted = compressor.decompress(stored, scheme)["weight"]
        stored = {part: value for part, value in stored.items() if value is not None}
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in stored.items()}
        tensors[f"{name}.dequantized"] = wanted.float()
        groups[name] = json.loads(scheme.model_dump_json())
    save_file(tensors, path, metadata={"groups": json.dumps(groups)})


if __name__ == "__main__":
    main(sys.argv[1])
