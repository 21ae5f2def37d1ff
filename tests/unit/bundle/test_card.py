"""What lists tell of a model's files: parameters, digest, facts under GGUF's names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from osaurus.bundle.card import card_of, parameter_label
from unit.bundle.made import folder_tensors, gguf_tensors, write_folder, write_gguf


def test_a_gguf_tells_of_itself(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "M" / "m-Q8_0.gguf", encoding="Q8_0")
    card = card_of("M:Q8_0", path)
    count = sum(tensor.size for tensor in gguf_tensors().values())
    assert (card.format, card.family, card.quantization) == ("gguf", "llama", "Q8_0")
    assert card.num_parameters == count
    assert card.info["general.architecture"] == "llama"
    assert card.info["general.parameter_count"] == count
    assert card.info["llama.embedding_length"] == 64
    assert not any("tokens" in key or "chat_template" in key for key in card.info)


def test_a_folder_tells_the_same_by_the_same_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "M", config={"num_key_value_heads": 2, "rope_theta": 1e4})
    (folder / "LICENSE").write_text("Do what you like.")
    card = card_of("M", folder)
    assert (card.format, card.family) == ("safetensors", "llama")
    assert card.num_parameters == sum(tensor.numel() for tensor in folder_tensors().values())
    assert card.info["llama.context_length"] == 256
    assert card.info["llama.attention.head_count_kv"] == 2
    assert card.licence == "Do what you like."


def test_quantized_codes_count_as_what_they_stand_for(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 8, dtype=torch.int32),
        "model.embed_tokens.scales": torch.zeros(10, 1),
        "model.embed_tokens.biases": torch.zeros(10, 1),
        "model.norm.weight": torch.zeros(64),
    }
    folder = write_folder(
        tmp_path / "M", config={"quantization": {"bits": 4, "group_size": 64}}, tensors=tensors
    )
    assert card_of("M", folder).num_parameters == 10 * 64 + 64


def test_the_digest_changes_with_the_files_and_only_then(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "M")
    first = card_of("M", folder)
    assert len(first.digest) == 64
    assert card_of("M", folder) is first
    os.utime(folder / "config.json", ns=(1, 1))
    second = card_of("M", folder)
    assert second.digest != first.digest
    assert card_of("N", folder).digest != second.digest


def test_a_model_that_is_not_whole_has_a_card_too(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path / "absent.gguf"):
        card = card_of("M", path)
        assert (card.format, card.num_parameters, dict(card.info)) == ("", 0, {})


@pytest.mark.parametrize(
    ("count", "label"),
    [(0, ""), (999, "999"), (134_515_008, "134.5M"), (7 * 10**9, "7.0B"), (10**12, "1.0T")],
)
def test_counts_are_written_as_people_say_them(count: int, label: str) -> None:
    assert parameter_label(count) == label
