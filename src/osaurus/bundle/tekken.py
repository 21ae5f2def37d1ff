"""Mistral's `tekken.json` as a byte-level BPE of the `tokenizers` library.

The file ranks tokens by their bytes and knows no merges: of all neighbours whose join is a token,
the one of the lowest rank is joined first. Every way to cut a token into two others, in the order
of ranks, is a list of merges that does the same. Special tokens have the first ids, ranks follow.

Source: the file format of mistral-common (`config`, `vocab`, `special_tokens`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from osaurus.bundle.pretokenizers import PreTokenizer, build_pre_tokenizer
from osaurus.bundle.tokenizer import BYTE_ALPHABET
from osaurus.errors import DamagedBundle, IncompleteBundle

FILE_NAME = "tekken.json"
#: The names that chat templates use -> the texts, which are the same in every file.
SPECIAL_TEXTS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
#: The special tokens of files that do not list theirs (versions up to 7), in order.
_UNLISTED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


def backend_from_tekken(path: Path) -> tuple[tokenizers.Tokenizer, list[str]]:
    """The BPE, and every id's text: one text may stand for an ordinary token and a special one.

    Raises `IncompleteBundle` for a file that is cut, `DamagedBundle` for one that contradicts
    itself."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise IncompleteBundle(
            f"{path}: not readable ({error}); this looks like an unfinished download, fetch it "
            "again"
        ) from error
    try:
        return _backend(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DamagedBundle(f"{path}: not a tekken vocabulary: {what}") from error


def _backend(content: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, list[str]]:
    config = content["config"]
    count = int(config["default_num_special_tokens"])
    special = _special_tokens(content.get("special_tokens"), count)
    ranked = _ranked(content["vocab"], int(config["default_vocab_size"]) - count)
    taken = {token.content for token in special}
    vocab = {token.content: i for i, token in enumerate(special)}
    texts = {data: "".join(map(BYTE_ALPHABET.__getitem__, data)) for data in ranked}
    for data, rank in ranked.items():
        if (text := texts[data]) not in taken:
            vocab[text] = count + rank
    merges = [
        (texts[left], texts[right])
        for data in ranked
        if texts[data] not in taken
        for left, right in _cuts(data, ranked)
    ]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=True)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the vocabulary is not consistent: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = build_pre_tokenizer(PreTokenizer(splits=(str(config["pattern"]),)))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(special)
    return backend, [*(token.content for token in special), *texts.values()]


def _ranked(entries: Any, count: int) -> dict[bytes, int]:
    """Ranks by bytes, in their order; the file may hold more than are in use."""
    found: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:count]):
        try:
            data = base64.b64decode(entry["token_bytes"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"vocab[{rank}].token_bytes is not base64 ({error})") from None
        if entry["rank"] != rank or not data or data in found:
            raise ValueError(
                f"vocab[{rank}] has rank {entry['rank']!r}, or is empty or a repetition"
            )
        found[data] = rank
    if len(found) != count:
        raise ValueError(f"vocab has {len(found)} entries, default_vocab_size asks for {count}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise ValueError(f"vocab lacks the byte {missing[0]}")
    return found


def _cuts(data: bytes, ranked: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The ways to make a token of two others, those of the lowest ranks first."""
    pairs = [(data[:at], data[at:]) for at in range(1, len(data))]
    whole = [(left, right) for left, right in pairs if left in ranked and right in ranked]
    return sorted(whole, key=lambda pair: (ranked[pair[0]], ranked[pair[1]]))


def _special_tokens(listed: Any, count: int) -> list[AddedToken]:
    """By id; ids that the file does not name stand for texts that nobody writes."""
    if listed is None:
        listed = [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(_UNLISTED[:count])
        ]
    named: dict[int, AddedToken] = {}
    for entry in listed:
        rank, text = entry["rank"], entry["token_str"]
        if not isinstance(text, str) or type(rank) is not int or not 0 <= rank < count:
            raise ValueError(f"special token {text!r} has rank {rank!r} of {count}")
        is_control = bool(entry.get("is_control", True))
        named[rank] = AddedToken(text, special=is_control, normalized=False)
    return [
        named.get(rank) or AddedToken(f"<SPECIAL_{rank}>", special=True, normalized=False)
        for rank in range(count)
    ]
