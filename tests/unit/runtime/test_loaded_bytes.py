"""Claim: what weights will take is known from the files' headers: as much as the loaded model
says of itself, less only where native kernels keep a smaller form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from osaurus.bundle.bundle import open_bundle
from osaurus.models.registry import load_model
from osaurus.quant import linear
from osaurus.runtime.loaded_bytes import loaded_bytes
from osaurus.types.weights import TensorFacts
from tiny import save_tiny
from transformers_families import MADE
from unit.bundle.made import byte_level_tokenizer, gguf_metadata, write_gguf

#: Wide enough that norms are little and every group size fits.
WIDE: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4)


@pytest.fixture(autouse=True)
def without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_be_native", lambda weight: False, raising=False)


def _folder(folder: Path, **changes: Any) -> Path:
    save_tiny(folder, **{**WIDE, **changes})
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _check(path: Path, mode: Any = "bfloat16", quantize: Any = None) -> None:
    bundle = open_bundle(path)
    expected = load_model(bundle, compute_mode=mode, on_load=quantize).nbytes
    said = loaded_bytes(bundle.tensor_facts(), bundle.config, mode, quantize)
    assert said == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("mode", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_of_plain_weights(tmp_path: Path, mode: Any, quantize: Any) -> None:
    _check(_folder(tmp_path), mode, quantize)


@pytest.mark.parametrize("family", ["Hunyuan MoE", "gpt-oss"])
def test_of_experts_of_the_route(tmp_path: Path, family: str) -> None:
    made = {**MADE[family], "hidden_size": 256, "intermediate_size": 512}
    _check(_folder(tmp_path, **made), quantize="int8")


@pytest.mark.parametrize(
    "encoding",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"],
)
def test_of_gguf_blocks(tmp_path: Path, encoding: str) -> None:
    sizes = {"embedding_length": 256, "feed_forward_length": 512, "attention.head_count": 4}
    metadata = {**gguf_metadata(), **{f"llama.{key}": value for key, value in sizes.items()}}
    hidden, vocab = 256, len(metadata["tokenizer.ggml.tokens"])
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    for layer in range(2):
        parts = {
            **dict.fromkeys(("attn_norm", "ffn_norm"), (hidden,)),
            **dict.fromkeys(("attn_q", "attn_output"), (hidden, hidden)),
            **dict.fromkeys(("attn_k", "attn_v"), (128, hidden)),
            **dict.fromkeys(("ffn_gate", "ffn_up"), (512, hidden)),
            "ffn_down": (hidden, 512),
        }
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator).numpy()
        for name, shape in shapes.items()
    }
    _check(write_gguf(tmp_path / "m.gguf", metadata, tensors, encoding=encoding))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 128])
def test_of_mlx_matrices(tmp_path: Path, bits: int, group: int) -> None:
    folder = _folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
        n, k = tensors.pop(name).shape
        path = name.removesuffix(".weight")
        words = torch.zeros(n, k * bits // 32, dtype=torch.int32).view(torch.uint32)
        groups = torch.ones(n, k // group, dtype=torch.bfloat16)
        tensors |= {name: words, f"{path}.scales": groups, f"{path}.biases": groups.clone()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": bits, "group_size": group}
    (folder / "config.json").write_text(json.dumps(config))
    _check(folder)


@pytest.mark.parametrize(
    ("entry", "tensors", "bytes_a_weight"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            {"qweight": ((128, 512), "I32", 128 * 512 * 4), "scales": ((8, 512), "F16", 8192)},
            0.5 + 12 / 128,
        ),
        (
            {"quant_method": "fp8"},
            {"weight": ((512, 1024), "F8_E4M3", 512 * 1024), "weight_scale": ((1,), "F32", 4)},
            2.0,
        ),
        (
            {"mode": "nvfp4"},
            {"weight": ((512, 128), "U32", 512 * 512), "scales": ((512, 64), "U8", 512 * 64)},
            2.0,
        ),
        (
            {"quant_method": "mxfp4"},
            {"blocks": ((512, 32, 16), "U8", 512 * 512), "scales": ((512, 32), "U8", 512 * 32)},
            1 + 16 / 32,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            {"weight_packed": ((512, 256), "I32", 512 * 1024)},
            1 + 16 / 128,
        ),
    ],
)
def test_of_other_checkpoints(
    entry: dict[str, Any], tensors: dict[str, Any], bytes_a_weight: float
) -> None:
    facts = [
        TensorFacts(name=f"m.{part}", shape=shape, encoding=encoding, num_bytes=size)
        for part, (shape, encoding, size) in tensors.items()
    ]
    config = {"quantization_config": entry}
    said = loaded_bytes(facts, config, "bfloat16", None)
    assert said == pytest.approx(512 * 1024 * bytes_a_weight, rel=1e-6)
    assert loaded_bytes(facts, config, "float32", None) == 512 * 1024 * 4
