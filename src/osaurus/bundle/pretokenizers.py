"""How byte-level BPE families cut text into words, by the name a GGUF calls the cut.

A GGUF carries its vocabulary and merges but only a *name* for the split before them
(`tokenizer.ggml.pre`). This is the table of those names. Patterns are the ones published in
the families' own tokenizer.json files; names are those of ggml's converters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """`splits` are applied one after another, each to the pieces of the one before.

    `ignore_merges`: a word that is a token of its own is taken whole, whatever the merges say.
    `is_nfc`: the family composes characters before it splits.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    is_nfc: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(contractions: str, digits: str) -> str:
    """Words cut where capitals start, as in o200k and Mistral's Tekken."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contractions}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contractions}|{digits}|{_CASED_TAIL}"
    )


_CJK = "[一-龥ࠀ-一가-퟿]+"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3_WORDS = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: DeepSeek-LLM spells out the cased letters it knows; written as properties, less the two blocks
#: that its list lacks (Georgian small letters, mathematical alphabets).
_DEEPSEEK_LETTERS = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}\x{1D400}-\x{1D7FF}]]"

_DEFAULT = PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT2_CUT = PreTokenizer(splits=(_GPT2,))
_DIGITS_GPT2 = PreTokenizer(splits=(r"\p{N}", _GPT2))
_LLAMA3_CUT = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True)
_QWEN2_CUT = PreTokenizer(splits=(_QWEN2,), is_nfc=True)
_DEEPSEEK3 = PreTokenizer(splits=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS))
_GPT4O = PreTokenizer(splits=(_cased(_CONTRACTIONS + "?", r"\p{N}{1,3}"),))
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Names that share a cut.
_LLAMA3_NAMES = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano",
)  # fmt: skip
_GPT2_NAMES = (
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
    "a.x-4.0", "mellum", "modern-bert", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es",
    "jina-v2-de", "jina-v2-code", "roberta-bpe",
)  # fmt: skip

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3_CUT),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer(splits=(_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), _QWEN2_CUT),
    **dict.fromkeys(
        ("stablelm2", "hunyuan", "solar-open", "grok-2"), PreTokenizer(splits=(_QWEN2,))
    ),
    "qwen35": PreTokenizer(splits=(_QWEN35,), is_nfc=True),
    **dict.fromkeys(_GPT2_NAMES, _GPT2_CUT),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGITS_GPT2,
    ),
    "falcon": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        splits=(
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "step35"), _DEEPSEEK3),
    "tekken": PreTokenizer(splits=(_cased("", r"\p{N}"),), ignore_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer(splits=(_BLOOM,))),
    "viking": PreTokenizer(splits=(_BLOOM, r"\p{N}")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer(splits=(_BAILING,))),
    "seed-coder": PreTokenizer(splits=(_SEED_CODER,)),
}


def find_pre_tokenizer(name: object, where: object) -> PreTokenizer:
    """The entry called `name`; the default one, with a warning that names it, otherwise."""
    found = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if found is None:
        given = f"the unknown pre-tokenizer {name!r}" if name else "no pre-tokenizer"
        _log.warning(
            "%s: the metadata names %s (tokenizer.ggml.pre); text is split by the default rule, "
            "which can differ from how the model was trained",
            where,
            given,
        )
        return _DEFAULT
    return found


def build_pre_tokenizer(cut: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The splits, then bytes to the printable alphabet that byte-level vocabularies use."""
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.splits
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])


def build_normalizer(cut: PreTokenizer) -> normalizers.Normalizer | None:
    return normalizers.NFC() if cut.is_nfc else None
