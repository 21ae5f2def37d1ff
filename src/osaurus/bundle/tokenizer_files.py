"""A tokenizer from the files of a model folder.

In: a folder. Out: a `Tokenizer`, from `tokenizer.json` where there is one, else rebuilt from
Mistral's `tekken.json`, from `vocab.json` with `merges.txt`, or from a SentencePiece model. What a
family's class name would add beyond these files is taken from `tokenizer_config.json` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from osaurus.bundle import tekken
from osaurus.bundle.config import missing_tokenizer_file, read_optional, read_tokenizer_config
from osaurus.bundle.pretokenizers import PRE_TOKENIZERS, build_normalizer, build_pre_tokenizer
from osaurus.bundle.sentencepiece import backend_from_model
from osaurus.bundle.tokenizer import Alphabet, Tokenizer
from osaurus.errors import DamagedBundle, IncompleteBundle

_SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "prefix_token", "suffix_token", "middle_token",
)  # fmt: skip

#: Families that shipped `vocab.json` and `merges.txt` alone, and how their class splits text.
_CUT_OF_CLASS = {"Qwen2Tokenizer": "qwen2", "Qwen2TokenizerFast": "qwen2"}


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Raises `IncompleteBundle` when there is no vocabulary, `DamagedBundle` when it is damaged."""
    if (missing := missing_tokenizer_file(folder)) is not None:
        raise IncompleteBundle(
            f"{folder / missing}: the tokenizer is missing; this looks like an unfinished "
            "download, fetch it again"
        )
    config = read_tokenizer_config(folder)
    if not (folder / "tokenizer.json").is_file() and (folder / tekken.FILE_NAME).is_file():
        return _from_tekken(folder / tekken.FILE_NAME)
    backend = _backend(folder, config)
    backend.no_truncation()
    backend.no_padding()
    texts = _special_texts(config)
    unknown = getattr(backend.model, "unk_token", None)
    named = {"unk_token": unknown, **texts} if isinstance(unknown, str) else texts
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    alphabet, strips = _alphabet(backend)
    return Tokenizer(
        backend,
        alphabet=alphabet,
        bos_token_id=ids.get("bos_token"),
        eos_token_id=ids.get("eos_token"),
        unk_token_id=ids.get("unk_token"),
        special_tokens=texts,
        add_bos=_adds_bos(backend, config, ids.get("bos_token")),
        strips_leading_space=strips,
    )


def _from_tekken(path: Path) -> Tokenizer:
    backend, texts = tekken.backend_from_tekken(path)
    named = {
        name: text
        for name, text in tekken.SPECIAL_TEXTS.items()
        if backend.token_to_id(text) is not None
    }
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    return Tokenizer(
        backend,
        alphabet="byte_level",
        texts=texts,
        bos_token_id=ids.get("bos_token"),
        eos_token_id=ids.get("eos_token"),
        unk_token_id=ids.get("unk_token"),
        special_tokens=named,
        add_bos=True,
    )


def _backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise IncompleteBundle(
                f"{path}: not a readable tokenizer ({error}); this looks like an unfinished "
                "download, fetch it again"
            ) from error
    if (folder / "merges.txt").is_file():
        return _from_vocab_and_merges(folder, config)
    name = "tokenizer.model" if (folder / "tokenizer.model").is_file() else "spiece.model"
    backend = backend_from_model(folder / name)
    backend.add_tokens(_added_tokens(folder, config))
    return backend


def _from_vocab_and_merges(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises nothing narrower
        raise DamagedBundle(
            f"{folder / 'vocab.json'}: not a readable vocabulary ({error})"
        ) from error
    backend = tokenizers.Tokenizer(model)
    cut = PRE_TOKENIZERS[_CUT_OF_CLASS.get(str(config.get("tokenizer_class")), "gpt-2")]
    backend.pre_tokenizer = build_pre_tokenizer(cut)
    if (normalizer := build_normalizer(cut)) is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(folder, config))
    return backend


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Added tokens in the order of their ids, from whichever file lists them."""
    special = set(_special_texts(config).values())
    found: dict[int, AddedToken] = {}
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for token_id, entry in declared.items():
            if isinstance(entry, dict) and isinstance(entry.get("content"), str):
                flags = {k: bool(entry.get(k, False)) for k in ("lstrip", "rstrip", "single_word")}
                found[int(token_id)] = AddedToken(
                    entry["content"],
                    special=bool(entry.get("special", False)) or entry["content"] in special,
                    normalized=bool(entry.get("normalized", False)),
                    **flags,
                )
    for text, token_id in read_optional(folder / "added_tokens.json").items():
        if isinstance(token_id, int):
            token = AddedToken(text, special=text in special, normalized=False)
            found.setdefault(token_id, token)
    listed = {token.content for token in found.values()}
    rest = [AddedToken(t, special=True, normalized=False) for t in sorted(special - listed)]
    return [*(found[i] for i in sorted(found)), *rest]


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; an entry is a text or an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            found[name] = value
    return found


def _alphabet(backend: tokenizers.Tokenizer) -> tuple[Alphabet, bool]:
    """How stored texts stand for bytes, told by the decoder; and whether it strips a space."""
    decoder = _state(backend.decoder)
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return "byte_level", _state(backend.pre_tokenizer).get("add_prefix_space", False)
    if "ByteFallback" in kinds or "Metaspace" in kinds or _replaces_space_mark(steps):
        return "sentencepiece", _strips_space(steps)
    return "plain", False


def _state(part: Any) -> dict[str, Any]:
    return json.loads(part.__getstate__()) if part is not None else {}


def _replaces_space_mark(steps: list[dict[str, Any]]) -> bool:
    return any(
        s.get("type") == "Replace" and "\u2581" in json.dumps(s, ensure_ascii=False) for s in steps
    )


def _strips_space(steps: list[dict[str, Any]]) -> bool:
    for step in steps:
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start"):
            return True
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _adds_bos(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos_token_id: int | None
) -> bool:
    """The config's word, else what the tokenizer's own post-processing does to a text."""
    if isinstance(declared := config.get("add_bos_token"), bool):
        return declared
    return bos_token_id is not None and backend.encode("a").ids[:1] == [bos_token_id]
