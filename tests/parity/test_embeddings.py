"""Vectors of texts against transformers' hidden states, pooled and scaled as
sentence-transformers does it, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_embedders
from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.hub import find_model
from osaurus.engine.embedding import EmbeddingEngine
from osaurus.errors import ModelNotFound
from osaurus.models.embedding import load_encoder

TEXTS = [[2, 30, 3], [2, 5, 77, 8, 9, 10, 3], list(range(2, 34)), [2, *range(40, 100), 3]]


def engine_of(folder: Path) -> EmbeddingEngine:
    bundle = open_bundle(folder)
    assert bundle.embedding_spec is not None
    encoder = load_encoder(bundle, compute_mode="float32")
    return EmbeddingEngine(encoder, bundle.embedding_spec)


def vectors(folder: Path, texts: list[list[int]]) -> torch.Tensor:
    engine = engine_of(folder)
    try:
        return torch.tensor([list(v) for v in engine.start(texts).done.result(60)])
    finally:
        engine.shutdown()


@pytest.mark.parametrize("family", sorted(tiny_embedders.FAMILIES))
def test_every_encoder_family_gives_transformers_vectors(tmp_path: Path, family: str) -> None:
    model = tiny_embedders.save_encoder(tmp_path, family)
    found = vectors(tmp_path, TEXTS)
    wanted = torch.stack([tiny_embedders.reference(model, ids, "mean_tokens") for ids in TEXTS])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens", "max_tokens", "lasttoken"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_pooling_and_length_are_the_bundles(tmp_path: Path, pooling: str, normalizes: bool) -> None:
    model = tiny_embedders.save_encoder(tmp_path, pooling=pooling, normalizes=normalizes)
    found = vectors(tmp_path, TEXTS)
    for vector, ids in zip(found, TEXTS, strict=True):
        wanted = tiny_embedders.reference(model, ids, pooling, normalizes=normalizes)
        torch.testing.assert_close(vector, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("mistral", {"sliding_window": 16}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 16}),
    ],
)
def test_a_decoder_gives_the_hidden_state_of_its_last_token(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = tiny_embedders.save_decoder(tmp_path, family, **changes)
    found = vectors(tmp_path, TEXTS)
    wanted = torch.stack([tiny_embedders.reference(model, ids, "lasttoken") for ids in TEXTS])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-5)


def test_a_checkpoint_with_a_head_on_top_is_read_without_it(tmp_path: Path) -> None:
    import transformers

    plain = tiny_embedders.save_encoder(tmp_path / "plain")
    with_head = transformers.BertForMaskedLM(plain.config)
    with_head.bert.load_state_dict(plain.state_dict(), strict=False)
    tiny_embedders.save_tokenizer(tmp_path)
    with_head.save_pretrained(tmp_path / "headed", safe_serialization=True)
    tiny_embedders.save_tokenizer(tmp_path / "headed")
    torch.testing.assert_close(
        vectors(tmp_path / "headed", TEXTS), vectors(tmp_path / "plain", TEXTS)
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_minilm_gives_transformers_vectors() -> None:
    import transformers

    try:
        path = find_model("minilm").path
    except ModelNotFound as error:
        pytest.skip(f"{error.message}: osaurus pull minilm")
    sentences = [
        "The weather is lovely today.",
        "It's so sunny outside!",
        "Ünïcödé, 漢字 and an emoji 🦕.",
        "A longer one. " * 30,
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).float().eval()
    ids = [tokenizer(text, truncation=True, max_length=256).input_ids for text in sentences]
    ours = open_bundle(path).load_tokenizer()
    before, behind = ours.frame
    for text, wanted_ids in zip(sentences, ids, strict=True):
        own = [*before, *ours.encode(text), *behind]
        assert own == wanted_ids
    found = vectors(path, ids)
    wanted = torch.stack([tiny_embedders.reference(model, one, "mean_tokens") for one in ids])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    alike = found @ found.T
    assert alike[0, 1] > 0.6 > alike[0, 2]
    assert json.loads((path / "sentence_bert_config.json").read_text())["max_seq_length"] == 256
