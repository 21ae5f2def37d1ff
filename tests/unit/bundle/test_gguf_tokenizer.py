"""Tokenizers rebuilt from GGUF metadata: field case F35, and every cut against llama.cpp."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import pytest

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.gguf_reader import read_gguf
from osaurus.bundle.gguf_tokenizer import tokenizer_from_gguf
from osaurus.bundle.pretokenizers import PRE_TOKENIZERS, build_pre_tokenizer
from osaurus.bundle.tokenizer import Tokenizer
from osaurus.bundle.tokenizer_files import tokenizer_from_folder
from osaurus.errors import BundleError, IncompleteBundle, UnsupportedBundle
from unit.bundle.made import (
    BYTE_TOKENS,
    BYTE_TYPES,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    gguf_metadata,
    write_gguf,
)

#: A small SentencePiece vocabulary: control tokens, all byte tokens, some pieces.
PIECES = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "im"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
SPM: dict[str, Any] = {
    "model": "llama",
    "pre": None,
    "merges": None,
    "tokens": SPM_TOKENS,
    "token_type": [UNKNOWN, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * len(PIECES)],
    "scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def tokenizer(path: Path, **changes: Any) -> Tokenizer:
    write_gguf(path, gguf_metadata(**changes), {})
    return tokenizer_from_gguf(read_gguf(path))


# --- F35 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "flag", "adds"),
    [
        ("gpt2", False, False),
        ("gpt2", True, True),
        ("gpt2", None, False),
        ("llama", False, False),
        ("llama", True, True),
        ("llama", None, True),
    ],
)
def test_f35_bos_is_added_as_the_file_says_or_its_kind_implies(
    tmp_path: Path, kind: str, flag: bool | None, adds: bool
) -> None:
    changes = SPM if kind == "llama" else {}
    made = tokenizer(tmp_path / "x.gguf", **changes, add_bos_token=flag)
    assert made.add_bos is adds
    assert made.add_bos_to_chat is adds
    ids = made.encode("hello", add_bos=made.add_bos)
    assert ids.count(1) == int(adds)
    assert ids[: int(adds)] == [1] * int(adds)


@pytest.mark.parametrize(("changes", "bos"), [({}, "<|im_start|>"), (SPM, "<s>")])
def test_f35_a_bos_that_the_template_wrote_is_the_only_one(
    tmp_path: Path, changes: dict[str, Any], bos: str
) -> None:
    made = tokenizer(tmp_path / "x.gguf", **changes, add_bos_token=True)
    ids = made.encode(f"{bos}hello", parse_special=True, add_bos=made.add_bos_to_chat)
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_f35_control_and_user_defined_texts_become_one_id_each(tmp_path: Path) -> None:
    tokens = [*BYTE_TOKENS, "<think>", "<tool_call>"]
    types = [*BYTE_TYPES, USER_DEFINED, CONTROL]
    made = tokenizer(tmp_path / "x.gguf", tokens=tokens, token_type=types)
    for text in ("<|im_end|>", "<think>", "<tool_call>"):
        ids = made.encode(f"a{text}b", parse_special=True)
        assert ids.count(made.id_of(text)) == 1
        assert made.decode(ids) == f"a{text}b"
        assert made.id_of(text) not in made.encode(f"a{text}b")
    assert made.id_of("<think>") not in made.special_ids
    assert made.id_of("<tool_call>") in made.special_ids


def test_f35_both_end_ids_stop_the_answer(tmp_path: Path) -> None:
    metadata = gguf_metadata(eos_token_id=0, eot_token_id=2, eom_token_id=5)
    bundle = open_bundle(write_gguf(tmp_path / "x.gguf", metadata))
    assert {0, 2, 5} <= bundle.eos_token_ids


def test_f35_an_unknown_cut_falls_back_to_the_default_with_a_warning_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        unknown = tokenizer(tmp_path / "x.gguf", pre="rocket-9")
    assert "'rocket-9'" in caplog.text
    default = tokenizer(tmp_path / "y.gguf", pre="default")
    text = "hello world, 12345 <|x|> ==>"
    assert unknown.encode(text) == default.encode(text)


def test_f35_a_special_id_that_the_metadata_lacks_is_absent(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "x.gguf", bos_token_id=None, eos_token_id=None, add_bos_token=True)
    assert made.bos_token_id is None
    assert made.eos_token_id is None
    assert made.unk_token_id is None
    assert made.add_bos is False
    assert made.special_tokens == {}
    assert made.encode("hello", add_bos=True) == made.encode("hello")


def test_a_special_id_outside_the_vocabulary_is_reported_and_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = tokenizer(tmp_path / "x.gguf", bos_token_id=10**6)
    assert made.bos_token_id is None
    assert "bos_token_id is 1000000" in caplog.text


def test_llama3_gets_the_bos_it_was_trained_with_when_the_flag_is_absent(tmp_path: Path) -> None:
    tokens = ["<|begin_of_text|>", *BYTE_TOKENS[1:]]
    made = tokenizer(tmp_path / "x.gguf", tokens=tokens, bos_token_id=0, pre="llama-bpe")
    assert made.add_bos


def test_an_end_token_that_the_converter_called_normal_is_still_control(tmp_path: Path) -> None:
    types = [NORMAL] * len(BYTE_TYPES)
    made = tokenizer(tmp_path / "x.gguf", token_type=types, bos_token_id=None, eos_token_id=None)
    assert made.special_ids == {0, 2}
    assert made.encode("<|im_end|>", parse_special=True) == [2]
    assert 2 not in made.encode("<|im_end|>")


# --- cuts -----------------------------------------------------------------------------------

CUTS = json.loads((Path(__file__).parents[2] / "golden" / "bundle" / "cuts.json").read_text())


@pytest.mark.parametrize("name", CUTS["ids"])
def test_each_cut_gives_the_ids_of_llama_cpp(tmp_path: Path, name: str) -> None:
    tokens = CUTS["tokens"]
    made = tokenizer(
        tmp_path / "x.gguf",
        pre=name,
        tokens=tokens,
        merges=CUTS["merges"],
        token_type=[CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 2)],
        bos_token_id=None,
        eos_token_id=0,
    )
    for text, ids in zip(CUTS["texts"], CUTS["ids"][name], strict=True):
        # llama.cpp leaves out that Qwen's own tokenizers compose characters first.
        if not PRE_TOKENIZERS[name].is_nfc or is_normalized("NFC", text):
            assert made.encode(text) == ids, text


def test_a_family_that_composes_characters_first_does_so_here(tmp_path: Path) -> None:
    qwen2, gpt2 = (tokenizer(tmp_path / f"{name}.gguf", pre=name) for name in ("qwen2", "gpt-2"))
    assert qwen2.encode("e\u0301") == qwen2.encode("\u00e9")
    assert gpt2.encode("e\u0301") != gpt2.encode("\u00e9")


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_no_cut_loses_or_adds_a_character(name: str) -> None:
    cut = build_pre_tokenizer(PRE_TOKENIZERS[name])
    for text in CUTS["texts"]:
        pieces = cut.pre_tokenize_str(text)
        spans = [span for _, span in pieces]
        assert "".join(text[a:b] for a, b in dict.fromkeys(spans)) == text


# --- SentencePiece --------------------------------------------------------------------------


def test_sentencepiece_pieces_join_by_score(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "x.gguf", **SPM)
    ids = made.encode("hello w")
    assert [SPM_TOKENS[i] for i in ids] == ["▁hello", "▁w"]
    assert made.decode(ids) == "hello w"
    assert made.strips_leading_space


def test_a_character_without_a_piece_falls_back_to_its_bytes(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "x.gguf", **SPM)
    ids = made.encode("日")
    assert [made.token_bytes(i) for i in ids] == [b" ", b"\xe6", b"\x97", b"\xa5"]
    assert made.decode(ids) == "日"


def test_a_file_may_forbid_the_space_in_front(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "x.gguf", **SPM, add_space_prefix=False)
    assert [SPM_TOKENS[i] for i in made.encode("hello")] == ["hello"]
    assert made.decode(made.encode(" hello")) == " hello"


@pytest.mark.parametrize("name", ["prefix", "bare", "squeeze"])
def test_sentencepiece_models_encode_as_their_own_libraries(
    tmp_path: Path, golden: Callable[[str], Any], name: str
) -> None:
    """The model file as sentencepiece reads it; the same as a GGUF as llama.cpp reads it."""
    data = golden("sentencepiece.json")
    texts, model = data["texts"], data["models"][name]
    (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(model["model_base64"]))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    from_file = tokenizer_from_folder(tmp_path)
    for text, ids in zip(texts, model["sentencepiece"], strict=True):
        # sentencepiece always matches user-defined pieces; we ask for control text instead.
        if "<" not in text:
            assert from_file.encode(text) == ids, text
    from_gguf = tokenizer(tmp_path / "x.gguf", **as_gguf(tmp_path / "tokenizer.model"))
    for text, plain, special in zip(
        texts, model["llama_cpp"], model["llama_cpp_special"], strict=True
    ):
        assert from_gguf.encode(text, parse_special=True) == special, text
        if "<|im_end|>" not in text:
            assert from_gguf.encode(text) == plain, text


def as_gguf(path: Path) -> dict[str, Any]:
    """The same vocabulary as GGUF metadata."""
    from osaurus.bundle.sentencepiece import _read_model

    model = _read_model(path.read_bytes())
    texts, scores, types = zip(*model.pieces, strict=True)
    return {
        **SPM,
        "tokens": list(texts),
        "scores": list(scores),
        "token_type": list(types),
        "add_space_prefix": model.adds_space,
    }


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model": "t5"}, UnsupportedBundle, "'t5' is not supported"),
        ({"model": None}, UnsupportedBundle, "None is not supported"),
        ({"tokens": None}, IncompleteBundle, "lacks tokenizer.ggml.tokens"),
        ({"merges": None}, IncompleteBundle, "lacks tokenizer.ggml.merges"),
        ({"token_type": [1, 2]}, BundleError, "has 2 entries for"),
        ({"merges": ["q q zz"]}, BundleError, "not consistent"),
        ({**SPM, "scores": None}, IncompleteBundle, "lacks tokenizer.ggml.scores"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(
    tmp_path: Path, changes: dict[str, Any], kind: type[BundleError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        tokenizer(tmp_path / "x.gguf", **changes)


@pytest.mark.parametrize(
    "data", [b"", b"IQ== 0\nIg== 1\n", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x03\x0a\x05a"]
)
def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(UnsupportedBundle, match=r"tokenizer\.model"):
        tokenizer_from_folder(tmp_path)
