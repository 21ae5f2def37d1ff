"""Mistral's tekken.json: the ids that joining bytes by rank gives, special texts by their ids."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.tokenizer import BYTE_ALPHABET
from osaurus.bundle.tokenizer_files import tokenizer_from_folder
from osaurus.errors import BundleError, IncompleteBundle
from unit.bundle.made import write_folder

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_SPECIAL = 24
CORPUS = [
    Path(__file__).read_text(),
    "straße naïve 日本語テキスト 한국어 नमस्ते 🙂 مرحبا aaaa aaaaaaa" * 5,
]


def made(**changes: Any) -> dict[str, Any]:
    """A vocabulary trained on a little text, as the file has it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    byte_of = {char: byte for byte, char in BYTE_ALPHABET.items()}
    ids = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[char] for char in text) for text, _ in ids]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(data).decode(), "token_str": None}
        for rank, data in enumerate(tokens)
    ]
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(entries),
            # The last hundred tokens are in the file and not in use.
            "default_vocab_size": len(entries) - 100 + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v3",
        },
        "vocab": entries,
        **changes,
    }


def write(folder: Path, content: dict[str, Any]) -> Path:
    write_folder(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def by_rank(text: str, content: dict[str, Any]) -> list[int]:
    """The definition: of all neighbours whose join is a token, the lowest rank, the first such."""
    count = content["config"]["default_vocab_size"] - NUM_SPECIAL
    ranks = {base64.b64decode(e["token_bytes"]): e["rank"] for e in content["vocab"][:count]}
    found: list[int] = []
    for word in regex.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [(ranks.get(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1)]
            best = min(((rank, i) for rank, i in pairs if rank is not None), default=None)
            if best is None:
                break
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
        found += [ranks[part] + NUM_SPECIAL for part in parts]
    return found


def test_ids_are_those_of_joining_by_rank(tmp_path: Path) -> None:
    content = made()
    tokenizer = tokenizer_from_folder(write(tmp_path, content))
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    places = [(32, 127), (0xA0, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF), (97, 99)]
    texts = [*CORPUS, " ", "aaaaaaaaaaa", "a/b\r\n\n x"]
    texts += [
        "".join(chr(chance.randrange(*chance.choice(places))) for _ in range(chance.randrange(40)))
        for _ in range(300)
    ]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == by_rank(text, content), (seed, text)
        assert tokenizer.decode(ids) == text, (seed, text)
    assert tokenizer.vocab_size == content["config"]["default_vocab_size"]


def test_special_texts_are_one_id_only_where_asked_for(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(write(tmp_path, made()))
    text = "<s>[INST] hi [/INST]</s>"
    parsed = tokenizer.encode(text, parse_special=True)
    assert (parsed[:2], parsed[-2:]) == ([1, 3], [4, 2])
    assert min(tokenizer.encode(text)) >= NUM_SPECIAL
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    assert tokenizer.encode("x", add_bos=True)[0] == 1
    assert tokenizer.token_bytes(23) == b"<SPECIAL_23>"


def test_listed_special_tokens_are_the_files(tmp_path: Path) -> None:
    listed = [
        {"rank": 0, "token_str": "<unk>", "is_control": True},
        {"rank": 1, "token_str": "<s>", "is_control": True},
        {"rank": 2, "token_str": "</s>", "is_control": True},
        {"rank": 5, "token_str": "[THINK]", "is_control": False},
    ]
    tokenizer = tokenizer_from_folder(write(tmp_path, made(special_tokens=listed)))
    assert tokenizer.added_tokens["[THINK]"] == 5
    assert 5 not in tokenizer.special_ids
    assert tokenizer.encode("[THINK]</s>", parse_special=True) == [5, 2]
    assert "[INST]" not in tokenizer.added_tokens


def test_a_bundle_with_a_tekken_file_alone_is_whole(tmp_path: Path) -> None:
    bundle = open_bundle(write(tmp_path, made()))
    assert 2 in bundle.eos_token_ids
    with_it = bundle.fingerprint
    write(tmp_path, made(special_tokens=[]))
    assert open_bundle(tmp_path).fingerprint != with_it


def _drop_byte(content: dict[str, Any]) -> None:
    content["vocab"][7]["token_bytes"] = base64.b64encode(b"zzzz").decode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("config"), "'config' is missing"),
        (lambda c: c["config"].pop("pattern"), "'pattern' is missing"),
        (lambda c: c["config"].update(default_vocab_size=10**6), "default_vocab_size asks for"),
        (lambda c: c["vocab"][3].update(rank=9), "vocab[3] has rank 9"),
        (lambda c: c["vocab"][3].update(token_bytes="%%"), "vocab[3].token_bytes is not base64"),
        (_drop_byte, "vocab lacks the byte"),
        (
            lambda c: c.update(special_tokens=[{"rank": 99, "token_str": "<s>"}]),
            "special token '<s>' has rank 99 of 24",
        ),
    ],
)
def test_a_contradictory_file_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    content = made()
    change(content)
    with pytest.raises(BundleError) as caught:
        tokenizer_from_folder(write(tmp_path, content))
    assert words in caught.value.message
    assert "tekken.json" in caught.value.message


def test_a_cut_file_looks_like_an_unfinished_download(tmp_path: Path) -> None:
    folder = write(tmp_path, made())
    data = (folder / "tekken.json").read_bytes()
    (folder / "tekken.json").write_bytes(data[:-50])
    with pytest.raises(IncompleteBundle, match="unfinished download"):
        tokenizer_from_folder(folder)
