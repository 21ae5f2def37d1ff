"""Writes what MLX itself makes of small weights: run it with a Python that has `mlx-lm`.

    python make.py matrices FILE      single matrices, each quantization with its own dequantized
    python make.py model FOLDER BITS GROUP [MODE]
                                      a random Llama converted by mlx-lm, with its logits

`matrices.safetensors` and `model/` beside this file were made so, by mlx 0.32 and mlx-lm 0.32.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.convert import convert
from mlx_lm.utils import load
from tokenizers import Tokenizer, models

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 64, 64, 2, 1, 32, 1
TOKENS = [1, 7, 33, 60, 2, 18, 40, 5]
FORMS: list[tuple[str, int, int]] = [
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    ("affine", 4, 32),
    ("affine", 3, 128),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


def matrices(path: Path) -> None:
    """`<mode>-<bits>-<group>.weight`, `.scales`, `.biases`, and `.dequantized` in float32."""
    mx.random.seed(0)
    found: dict[str, mx.array] = {}
    for mode, bits, group in FORMS:
        weight = mx.random.normal((2, 128)) * 0.3 + 0.01
        form: dict[str, Any] = dict(mode=mode, bits=bits, group_size=group)
        parts = mx.quantize(weight, **form)
        names = ("weight", "scales", "biases")[: len(parts)]
        name = f"{mode}-{bits}-{group}"
        found |= {f"{name}.{part}": value for part, value in zip(names, parts, strict=True)}
        found[f"{name}.dequantized"] = mx.dequantize(*parts, **form, dtype=mx.float32)
    mx.save_safetensors(str(path), found)


def model(folder: Path, bits: int, group: int, mode: str) -> None:
    """Converted with one projection at 8 bits and one left alone where the mode is affine."""
    with tempfile.TemporaryDirectory() as original:
        write_llama(Path(original))

        def predicate(path: str, _: Any) -> bool | dict[str, Any]:
            if mode == "affine" and path.endswith("down_proj"):
                return {"bits": 8, "group_size": 32, "mode": "affine"}
            return not (mode == "affine" and path.endswith("v_proj"))

        convert(
            original,
            str(folder),
            quantize=True,
            q_bits=bits,
            q_group_size=group,
            q_mode=mode,
            dtype="float32",
            quant_predicate=predicate,
        )
    loaded, *_ = load(str(folder))
    logits = np.array(loaded(mx.array([TOKENS]))[0].astype(mx.float32))
    mx.save_safetensors(
        str(folder / "expected.safetensors"),
        {"tokens": mx.array(TOKENS), "logits": mx.array(logits)},
    )
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors", "expected.safetensors"):
            path.unlink()


def write_llama(folder: Path) -> None:
    """A Llama of random float32 weights in Hugging Face form."""
    random = np.random.default_rng(1)

    def matrix(n: int, k: int) -> mx.array:
        return mx.array(random.normal(0, 1.5 * k**-0.5, (n, k)).astype(np.float32))

    def norm() -> mx.array:
        return mx.array(1 + 0.1 * random.standard_normal(HIDDEN).astype(np.float32))

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": norm()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(q, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, q),
            f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.post_attention_layernorm.weight": norm(),
        }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {chr(33 + i): i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="!")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": '"'}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    what, where, *form = sys.argv[1:]
    if what == "matrices":
        matrices(Path(where))
    else:
        model(Path(where), int(form[0]), int(form[1]), form[2] if len(form) > 2 else "affine")
