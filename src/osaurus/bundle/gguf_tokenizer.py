"""A tokenizer rebuilt from the metadata of a GGUF.

In: an open `GgufFile`. Out: a `Tokenizer` with the file's own ids. Two kinds of vocabulary are
known: `gpt2` (byte-level BPE with its merges) and `llama` (SentencePiece BPE, where merges
follow from the pieces' scores). Others are refused: a wrong split gives wrong answers silently.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from osaurus.bundle.end_tokens import END_TOKEN_TEXTS
from osaurus.bundle.gguf_reader import GgufFile
from osaurus.bundle.pretokenizers import build_normalizer, build_pre_tokenizer, find_pre_tokenizer
from osaurus.bundle.sentencepiece import merges_from_scores, piece_decoder, space_normalizer
from osaurus.bundle.tokenizer import Tokenizer
from osaurus.errors import DamagedBundle, IncompleteBundle, UnsupportedBundle

_log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

#: Metadata key (`tokenizer.ggml.{key}_token_id`) -> the name chat templates use.
_SPECIAL_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # the format's own spelling
    "fim_pre": "prefix_token",
    "fim_suf": "suffix_token",
    "fim_mid": "middle_token",
    "prefix": "prefix_token",  # as older files have them
    "suffix": "suffix_token",
    "middle": "middle_token",
}


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Raises `UnsupportedBundle` for a vocabulary of another kind."""
    vocabulary = _Vocabulary(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(file, vocabulary)
    if kind == "llama":
        return _sentencepiece(file, vocabulary)
    raise UnsupportedBundle(
        f"{file.path}: tokenizer kind {kind!r} is not supported in a GGUF (gpt2 and llama are)"
    )


class _Vocabulary:
    """Texts, types and special ids, with what the metadata lacks left absent."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.texts: list[str] = self._array("tokens")
        self.types: list[int] = self._array("token_type", required=False)
        self.special = {key: self.token_id(f"{key}_token_id") for key in _SPECIAL_NAMES}
        self.by_text = {text: i for i, text in enumerate(self.texts) if text}

    def _array(self, key: str, *, required: bool = True) -> list[Any]:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None and not required:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
            raise IncompleteBundle(f"{self.file.path}: the metadata lacks tokenizer.ggml.{key}")
        items = list(value)
        if key != "tokens" and len(items) != len(self.texts) and key != "merges":
            raise DamagedBundle(
                f"{self.file.path}: tokenizer.ggml.{key} has {len(items)} entries for "
                f"{len(self.texts)} tokens"
            )
        return items

    def scores(self) -> list[float]:
        return self._array("scores")

    def merges(self) -> list[str]:
        return self._array("merges")

    def token_id(self, key: str) -> int | None:
        """A special id; absent stays absent, one outside the vocabulary is reported."""
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if type(value) is int and 0 <= value < len(self.texts):
            return value
        _log.warning(
            "%s: tokenizer.ggml.%s is %r, outside the vocabulary", self.file.path, key, value
        )
        return None

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, bool) else default

    def added(self) -> list[AddedToken]:
        """Tokens matched before the vocabulary: control ones, then user-defined ones.

        A special id or a known end token counts as control even where the converter called
        it normal: such files exist, and the text must be one id.
        """
        control = {i for i in self.special.values() if i is not None}
        control.update(self.by_text[t] for t in END_TOKEN_TEXTS if t in self.by_text)
        control.update(i for i, kind in enumerate(self.types) if kind in (_CONTROL, _UNKNOWN))
        user = [
            i for i, kind in enumerate(self.types) if kind == _USER_DEFINED and i not in control
        ]
        return [
            AddedToken(self.texts[i], special=i in control, normalized=False)
            for i in [*sorted(control), *user]
            if self.by_text.get(self.texts[i]) == i
        ]

    def normal_pieces(self) -> dict[str, int]:
        """What text may be assembled into: neither control, unused nor byte tokens."""
        if not self.types:
            return self.by_text
        return {text: i for text, i in self.by_text.items() if self.types[i] == _NORMAL}


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre")
    cut = find_pre_tokenizer(pre, file.path)
    merges = []
    for text in vocabulary.merges():
        # The first character may itself be a space mark, so the separator is sought after it.
        space = text.find(" ", 1)
        merges.append((text[:space], text[space + 1 :]))
    backend = _backend(
        file,
        vocabulary,
        models.BPE,
        vocab=vocabulary.by_text,
        merges=merges,
        ignore_merges=cut.ignore_merges,
    )
    backend.pre_tokenizer = build_pre_tokenizer(cut)
    if (normalizer := build_normalizer(cut)) is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, vocabulary, "byte_level", add_bos=_is_llama3(vocabulary))


def _sentencepiece(file: GgufFile, vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.special["unknown"]
    backend = _backend(
        file,
        vocabulary,
        models.BPE,
        vocab=vocabulary.by_text,
        merges=merges_from_scores(vocabulary.normal_pieces(), vocabulary.scores()),
        unk_token=None if unknown is None else vocabulary.texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    adds_space = vocabulary.flag("add_space_prefix", default=True)
    backend.normalizer = space_normalizer(adds_space=adds_space)
    backend.decoder = piece_decoder(strips_space=adds_space)
    return _finish(
        backend, vocabulary, "sentencepiece", add_bos=True, strips_leading_space=adds_space
    )


def _backend(
    file: GgufFile, vocabulary: _Vocabulary, model: type[models.BPE], **arguments: Any
) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer(model(**arguments))
    except Exception as error:  # the library raises nothing narrower
        raise DamagedBundle(f"{file.path}: the vocabulary is not consistent: {error}") from error
    backend.add_tokens(vocabulary.added())
    return backend


def _finish(
    backend: tokenizers.Tokenizer,
    vocabulary: _Vocabulary,
    alphabet: Any,
    *,
    add_bos: bool,
    strips_leading_space: bool = False,
) -> Tokenizer:
    """`add_bos` is the default of the vocabulary's kind; the file's own flag wins."""
    adds = vocabulary.flag("add_bos_token", default=add_bos)
    return Tokenizer(
        backend,
        alphabet=alphabet,
        texts=vocabulary.texts,
        bos_token_id=vocabulary.special["bos"],
        eos_token_id=vocabulary.special["eos"],
        unk_token_id=vocabulary.special["unknown"],
        special_tokens={
            name: vocabulary.texts[token_id]
            for key, name in _SPECIAL_NAMES.items()
            if (token_id := vocabulary.special[key]) is not None
        },
        add_bos=adds,
        add_bos_to_chat=adds,
        strips_leading_space=strips_leading_space,
    )


def _is_llama3(vocabulary: _Vocabulary) -> bool:
    """Llama 3 files lack the flag although the model was trained with a BOS; other byte-level
    vocabularies without the flag have none."""
    bos = vocabulary.special["bos"]
    return bos is not None and vocabulary.texts[bos] == "<|begin_of_text|>"
