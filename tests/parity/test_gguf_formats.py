"""Claim: a Llama whose matrices have every GGUF encoding we read answers as one of the dense
weights that the `gguf` package dequantizes them to, and close to it in the shipped mode.
"""

from __future__ import annotations

from contextlib import closing
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from osaurus.bundle.gguf_config import config_from_gguf
from osaurus.bundle.gguf_reader import read_gguf
from osaurus.bundle.weights import GgufSource, SafetensorsSource
from osaurus.models.registry import build
from osaurus.quant.gguf import FORMATS
from replay import decode_logits
from unit.bundle.made import add_value, gguf_metadata
from unit.quant.test_gguf_blocks import random_blocks

HIDDEN, VOCAB, LAYERS = 256, 64, 2
ENCODINGS = [*FORMATS, "F16", "BF16", "F32"]
#: Scales for weights of about 1 / sqrt(HIDDEN), by the size of the codes they multiply.
MAGNITUDE = {"Q8_0": 5e-4, "IQ4_NL": 5e-4, "Q2_K": 4e-3, "Q3_K": 6e-4, "Q6_K": 1e-5}


def stored(encoding: str, n: int, seed: int) -> np.ndarray:
    """Random weights of mean zero as the encoding stores them."""
    if encoding not in FORMATS:
        plain = np.random.default_rng(seed).normal(0, HIDDEN**-0.5, (n, HIDDEN))
        kind = gguf.GGMLQuantizationType[encoding]
        return gguf.quants.quantize(plain.astype(np.float32), kind)
    scale = MAGNITUDE.get(encoding, 2e-4 if encoding.endswith("_K") else 8e-3)
    if encoding.endswith("_1"):  # the minimum has to take half the range back
        raw = random_blocks(encoding, n, HIDDEN, seed, np.array([scale], np.float16))
        blocks = raw.reshape(-1, FORMATS[encoding].block_bytes)
        half = 1 << (FORMATS[encoding].bits - 1)
        blocks[:, 2:4] = np.array([-half * scale], np.float16).view(np.uint8)
        return raw
    return random_blocks(encoding, n, HIDDEN, seed, np.array([scale, -scale], np.float16))


def names() -> dict[str, int]:
    """GGUF name of every matrix and its rows."""
    found = {"token_embd.weight": VOCAB, "output.weight": VOCAB}
    for layer in range(LAYERS):
        parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        found |= {f"blk.{layer}.{part}.weight": HIDDEN for part in parts}
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GGUF, and a folder with the same weights in float32."""
    folder = tmp_path_factory.mktemp("formats")
    sizes = {
        "embedding_length": HIDDEN,
        "feed_forward_length": HIDDEN,
        "block_count": LAYERS,
        "attention.head_count_kv": 4,
    }
    metadata = gguf_metadata("llama") | {f"llama.{key}": value for key, value in sizes.items()}
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for key, value in metadata.items():
        add_value(writer, key, value)
    dense: dict[str, np.ndarray] = {}
    for number, (encoding, (name, n)) in enumerate(zip(cycle(ENCODINGS), names().items())):
        kind = gguf.GGMLQuantizationType[encoding]
        raw = stored(encoding, n, seed=number)
        writer.add_tensor(name, raw, raw_dtype=kind)
        dense[name] = gguf.quants.dequantize(raw, kind).reshape(n, HIDDEN)
    norms = [f"blk.{i}.{part}_norm.weight" for i in range(LAYERS) for part in ("attn", "ffn")]
    for name in [*norms, "output_norm.weight"]:
        dense[name] = np.ones(HIDDEN, np.float32)
        writer.add_tensor(name, dense[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource([read_gguf(folder / "m.gguf")])
    published = {source._places[name][1].name: name for name in source.names()}
    tensors = {published[name]: torch.from_numpy(value.copy()) for name, value in dense.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder / "m.gguf", folder


def test_a_model_of_all_encodings_answers_as_its_dequantized_weights(
    pair: tuple[Path, Path],
) -> None:
    path, folder = pair
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    file = read_gguf(path)
    config = config_from_gguf(file)
    assert {t.type.name for t in file.tensors.values()} == set(ENCODINGS)
    with closing(SafetensorsSource(folder)) as source:
        wanted = decode_logits(build(config, source, "float32"), tokens, 20)
    assert wanted.isfinite().all()
    for mode, bound in (("float32", 1e-4), ("bfloat16", 3e-2)):
        with closing(GgufSource([file])) as source:
            got = decode_logits(build(config, source, mode), tokens, 20)  # type: ignore[arg-type]
        assert (got - wanted).norm() / wanted.norm() < bound, mode
