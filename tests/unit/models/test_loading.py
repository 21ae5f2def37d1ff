"""Claims: a bundle whose tensors do not fit its config is refused by name before it answers;
what is stored is what is loaded, whatever its alignment, precision or tying.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from osaurus.errors import IncompleteBundle, UnsupportedBundle
from osaurus.models.llama import LlamaConfig
from osaurus.quant.linear import DenseEmbedding
from tiny import BASE, load_tiny, save_tiny


def _edit(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    save_tiny(tmp_path, "llama")
    _edit(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(IncompleteBundle, match=name.replace(".", r"\.")):
        load_tiny(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    _edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(95)}))
    with pytest.raises(UnsupportedBundle, match=r"model\.norm\.weight.*95.*96"):
        load_tiny(tmp_path)


def test_a_tensor_nobody_asked_for_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    _edit(tmp_path, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(UnsupportedBundle, match=r"model\.extra\.weight"):
        load_tiny(tmp_path)


def test_a_tied_head_stored_twice_is_kept_once_and_one_of_other_values_is_used(
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    embed = "model.embed_tokens.weight"
    _edit(tmp_path, lambda t: t.update({"lm_head.weight": t[embed].clone()}))
    model = load_tiny(tmp_path)
    assert model._head is model._embed
    _edit(tmp_path, lambda t: t.update({"lm_head.weight": t[embed] + 1}))
    model = load_tiny(tmp_path)
    assert isinstance(model._head, DenseEmbedding)
    assert isinstance(model._embed, DenseEmbedding)
    assert torch.equal(model._head.weight, model._embed.weight + 1)


def test_data_that_is_not_aligned_is_read_as_well(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length].rstrip(b" ")
    header += b" " * (1 - len(header) % 2)  # an odd length: no float in it is aligned
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    wanted = load_file(file)["model.embed_tokens.weight"]
    model = load_tiny(tmp_path)
    assert torch.equal(model._embed.weight, wanted)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_bundles_load_in_both_modes(tmp_path: Path, dtype: torch.dtype) -> None:
    save_tiny(tmp_path, "llama")
    _edit(tmp_path, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for mode, kept in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = load_tiny(tmp_path, mode)  # type: ignore[arg-type]
        assert torch.equal(model._embed(torch.arange(len(stored))), stored.to(kept).float())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"hidden_size": "96"}, "hidden_size"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"hidden_act": "relu2"}, "hidden_act"),
        ({"sliding_window": 8, "layer_types": ["odd"] * 3}, "layer_types"),
    ],
)
def test_a_config_that_cannot_be_served_names_its_field(change: dict, named: str) -> None:
    config = json.loads(json.dumps({**BASE, **change}))
    with pytest.raises(UnsupportedBundle, match=named):
        LlamaConfig.from_dict(config)
