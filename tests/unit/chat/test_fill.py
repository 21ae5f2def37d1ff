"""Fill in the middle: which marks a tokenizer has, and the ids that they make of two texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from api.scripted_engine import ByteTokenizer
from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.tokenizer import Tokenizer
from osaurus.chat.fill import fill_ends, fill_format_of, fill_ids
from unit.bundle import made


def tokenizer_with(*marks: str) -> ByteTokenizer:
    return ByteTokenizer(special=marks)


@pytest.mark.parametrize(
    ("marks", "suffix_first"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), False),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), False),
        (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), False),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), False),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), False),
        (("[PREFIX]", "[SUFFIX]"), True),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), True),
    ],
)
def test_every_familys_marks_are_known(marks: Sequence[str], suffix_first: bool) -> None:
    fill = fill_format_of(tokenizer_with(*marks))
    assert fill is not None
    assert fill.marks == tuple(marks)
    assert fill.suffix_first == suffix_first


@pytest.mark.parametrize("marks", [(), ("<fim_prefix>", "<fim_suffix>"), ("[SUFFIX]",)])
def test_a_part_of_the_marks_is_none(marks: Sequence[str]) -> None:
    assert fill_format_of(tokenizer_with("<bos>", *marks)) is None


def test_special_tokens_within_both_texts_are_honoured() -> None:
    tokenizer = tokenizer_with("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")
    fill = fill_format_of(tokenizer)
    assert fill is not None
    ids = fill_ids(tokenizer, fill, "a<file_sep>b", "c")
    assert ids == [256, 97, 259, 98, 257, 99, 258]
    assert fill_ends(tokenizer, fill) == {256, 257, 258, 259}


def test_code_llamas_suffix_has_no_word_mark_of_its_own() -> None:
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "z": 3, "▁a": 4, "▁z": 5, "☺": 6, "▁☺": 7}
    merges = [("▁", "a"), ("▁", "z"), ("▁", "☺")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens(marks)
    tokenizer = Tokenizer(backend, alphabet="sentencepiece", unk_token_id=0)
    fill = fill_format_of(tokenizer)
    assert fill is not None
    pre, suf, mid, _ = (backend.token_to_id(mark) for mark in marks)
    assert fill_ids(tokenizer, fill, "a", "z") == [pre, 4, suf, 3, mid]


def test_a_gguf_names_its_marks_by_id(tmp_path: Path) -> None:
    tokens = [*made.BYTE_TOKENS, "<pre>", "<suf>", "<mid>"]
    types = [*made.BYTE_TYPES, *[made.NORMAL] * 3]
    first = len(made.BYTE_TOKENS)
    path = tmp_path / "m.gguf"
    metadata = made.gguf_metadata(
        tokens=tokens,
        token_type=types,
        fim_pre_token_id=first,
        fim_suf_token_id=first + 1,
        fim_mid_token_id=first + 2,
    )
    made.write_gguf(path, metadata=metadata, tensors=made.gguf_tensors(vocab_size=len(tokens)))
    fill = fill_format_of(open_bundle(path).load_tokenizer())
    assert fill is not None
    assert fill.marks == ("<pre>", "<suf>", "<mid>")
