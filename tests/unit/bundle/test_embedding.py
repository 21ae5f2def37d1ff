"""What a folder says of itself as an embedding model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_embedders
from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.embedding import EmbeddingSpec, read_embedding_spec
from osaurus.errors import UnsupportedBundle

BERT = {"model_type": "bert"}
QWEN = {"model_type": "qwen3"}


def write(folder: Path, kinds: list[tuple[str, str]], pooling: Any = None, **files: Any) -> None:
    modules = [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


WHOLE = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


@pytest.mark.parametrize(
    ("pooling", "word"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 384}, "mean"),
        ({"pooling_mode_max_tokens": True, "include_prompt": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "pooling_mode_cls_token", "pooling_mode_cls_token": True}, "cls"),
    ],
)
def test_the_pooling_is_read(tmp_path: Path, pooling: dict[str, Any], word: str) -> None:
    write(tmp_path, WHOLE, pooling)
    assert read_embedding_spec(tmp_path, BERT) == EmbeddingSpec(pooling=word)  # type: ignore[arg-type]


def test_vectors_keep_their_length_without_a_module_that_changes_it(tmp_path: Path) -> None:
    write(tmp_path, WHOLE[:2], {"pooling_mode_mean_tokens": True})
    spec = read_embedding_spec(tmp_path, BERT)
    assert spec == EmbeddingSpec(pooling="mean", is_normalized=False)


def test_a_text_may_be_as_long_as_the_bundle_says(tmp_path: Path) -> None:
    write(
        tmp_path,
        WHOLE,
        {"pooling_mode_mean_tokens": True},
        sentence_bert_config={"max_seq_length": 256},
        tokenizer_config={"model_max_length": 512},
    )
    spec = read_embedding_spec(tmp_path, BERT)
    assert spec is not None
    assert spec.max_tokens == 256
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    assert read_embedding_spec(tmp_path, BERT).max_tokens == 512  # type: ignore[union-attr]
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert read_embedding_spec(tmp_path, BERT).max_tokens is None  # type: ignore[union-attr]


def test_an_encoder_without_modules_takes_the_mean(tmp_path: Path) -> None:
    assert read_embedding_spec(tmp_path, BERT) == EmbeddingSpec()


def test_a_model_that_writes_text_is_none(tmp_path: Path) -> None:
    assert read_embedding_spec(tmp_path, QWEN) is None


def test_a_decoder_with_modules_is_one(tmp_path: Path) -> None:
    write(tmp_path, WHOLE, {"pooling_mode_lasttoken": True})
    assert read_embedding_spec(tmp_path, QWEN) == EmbeddingSpec(pooling="last")


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        ([*WHOLE, ("Dense", "3_Dense")], {"pooling_mode_mean_tokens": True}, "'Dense'"),
        ([("Transformer", "0_Transformer")], {}, "'Transformer' in '0_Transformer'"),
        (WHOLE[:1], {}, "names no Pooling"),
        (WHOLE, {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (
            WHOLE,
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "cls_token and pooling_mode_mean_tokens",
        ),
        (WHOLE, {}, "by nothing"),
        ([("Transformer", ""), ("Pooling", "../other")], {}, "leaves the folder"),
    ],
)
def test_what_is_not_served_is_named(
    tmp_path: Path, kinds: list[tuple[str, str]], pooling: dict[str, Any], words: str
) -> None:
    write(tmp_path, kinds, pooling)
    with pytest.raises(UnsupportedBundle, match=words):
        read_embedding_spec(tmp_path, BERT)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"type": "x.Pooling"}]', "null"])
def test_broken_modules_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(UnsupportedBundle, match=r"modules\.json"):
        read_embedding_spec(tmp_path, BERT)


def test_the_frame_is_what_the_tokenizer_puts_around_a_text(tmp_path: Path) -> None:
    tiny_embedders.save_encoder(tmp_path, max_tokens=40)
    bundle = open_bundle(tmp_path)
    assert bundle.load_tokenizer().frame == ((2,), (3,))
    assert bundle.embedding_spec == EmbeddingSpec(max_tokens=40)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
        ({"num_attention_heads": 7}, "48 is no multiple of num_attention_heads 7"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_an_encoders_config_that_cannot_be_served_names_its_field(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    from osaurus.models.embedding import load_encoder

    tiny_embedders.save_encoder(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UnsupportedBundle, match=words):
        load_encoder(open_bundle(tmp_path), compute_mode="float32")
