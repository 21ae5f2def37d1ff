"""Small bundles written for tests: GGUFs by the `gguf` package, folders by `safetensors`.

Both writers are other people's, so that what we read was not written by ourselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

#: Dimensions of every made model.
SIZES = {"hidden": 64, "ffn": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

BYTE_ALPHABET: list[str] = sorted(pre_tokenizers.ByteLevel.alphabet())
#: A byte-level vocabulary with a few merges; specials first, as real ones have them.
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "i m", "< |"]
BYTE_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *BYTE_ALPHABET,
    *(m.replace(" ", "") for m in MERGES),
]
BYTE_TYPES = [CONTROL] * 3 + [NORMAL] * (len(BYTE_TOKENS) - 3)

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def gguf_tensors(
    architecture: str = "llama", vocab_size: int = len(BYTE_TOKENS), *, tied: bool = True
) -> dict[str, np.ndarray]:
    """Random float32 tensors in numpy (row-major) shape, by GGUF name."""
    random = np.random.default_rng(0)
    hidden, ffn, head_dim = SIZES["hidden"], SIZES["ffn"], SIZES["head_dim"]
    q, kv = SIZES["heads"] * head_dim, SIZES["kv_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    if not tied:
        shapes["output.weight"] = (vocab_size, hidden)
    for layer in range(SIZES["layers"]):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (hidden,),
            f"blk.{layer}.attn_q.weight": (q, hidden),
            f"blk.{layer}.attn_k.weight": (kv, hidden),
            f"blk.{layer}.attn_v.weight": (kv, hidden),
            f"blk.{layer}.attn_output.weight": (hidden, q),
            f"blk.{layer}.ffn_norm.weight": (hidden,),
            f"blk.{layer}.ffn_gate.weight": (ffn, hidden),
            f"blk.{layer}.ffn_up.weight": (ffn, hidden),
            f"blk.{layer}.ffn_down.weight": (hidden, ffn),
        }
        if architecture == "qwen2":
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"blk.{layer}.attn_{name}.bias"] = (size,)
        if architecture == "qwen3":
            shapes[f"blk.{layer}.attn_q_norm.weight"] = (head_dim,)
            shapes[f"blk.{layer}.attn_k_norm.weight"] = (head_dim,)
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def gguf_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Metadata of a whole model; a value of None in `changes` leaves the key out.

    In `changes`, `a__b` stands for the key `a.b` and `arch__x` for `{architecture}.x`.
    """
    metadata: dict[str, Any] = {
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": SIZES["hidden"],
        f"{architecture}.block_count": SIZES["layers"],
        f"{architecture}.feed_forward_length": SIZES["ffn"],
        f"{architecture}.attention.head_count": SIZES["heads"],
        f"{architecture}.attention.head_count_kv": SIZES["kv_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": BYTE_TOKENS,
        "tokenizer.ggml.token_type": BYTE_TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT,
    }
    for name, value in changes.items():
        key = name.replace("__", ".")
        if key.startswith("arch."):
            key = architecture + key.removeprefix("arch")
        elif not key.startswith(("general.", "tokenizer.", "split.")):
            key = f"tokenizer.ggml.{key}"
        metadata[key] = value
    return {key: value for key, value in metadata.items() if value is not None}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    architecture: str = "llama",
    encoding: str = "F32",
    alignment: int | None = None,
) -> Path:
    """Write with the `gguf` package. 2-D tensors get `encoding`, others stay float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in (gguf_metadata(architecture) if metadata is None else metadata).items():
        add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[encoding]
    for name, tensor in (gguf_tensors(architecture) if tensors is None else tensors).items():
        if tensor.ndim == 2 and encoding != "F32":
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def byte_level_tokenizer(
    added: Sequence[str | AddedToken] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
) -> tokenizers.Tokenizer:
    """The same kind of vocabulary as a `tokenizers` object; plain texts in `added` are special."""
    tokens = [*BYTE_ALPHABET, *(m.replace(" ", "") for m in MERGES)]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(m.split(" ")) for m in MERGES],
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in added]
    )
    return backend


def folder_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(300, 64).to(torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(96, 64).to(torch.bfloat16),
        "model.layers.0.mlp.down_proj.weight": torch.randn(64, 96).to(torch.bfloat16),
        "model.norm.weight": torch.randn(64),
    }


def llama_tensors() -> dict[str, torch.Tensor]:
    """A whole Llama of one layer for `write_folder`'s config."""
    g = torch.Generator().manual_seed(0)
    hidden, inner = 64, 96
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (300, hidden),
        "lm_head.weight": (300, hidden),
        **{f"{layer}.self_attn.{x}_proj.weight": (hidden, hidden) for x in "qkvo"},
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        "model.norm.weight": (hidden,),
    }
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def write_folder(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    backend: tokenizers.Tokenizer | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    num_shards: int = 1,
) -> Path:
    """A whole safetensors bundle; several shards get an index."""
    folder.mkdir(parents=True, exist_ok=True)
    published = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "vocab_size": 300,
        "eos_token_id": 257,
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(published))
    (backend or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT, **(tokenizer_config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_weights(folder, tensors or folder_tensors(), num_shards)
    return folder


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::num_shards]}
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
