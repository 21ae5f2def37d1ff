"""Fill in the middle: the prompt that makes a model write what stands between two texts.

Which tokens mark the two is the bundle's word: the tokens it declares as prefix, suffix and
middle, else those of a family known here. The order is the family's (Bavarian et al. 2022,
arXiv:2207.14255): prefix first, or suffix first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from osaurus.runtime.model import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FillFormat:
    """Texts of tokens around the two, in order; `middle` may be empty. `ends`: tokens that end
    the answer beside the model's own. `joins_suffix`: the suffix has no word mark of its own at
    its start, since it goes on where the middle ends (Rozière et al. 2023, arXiv:2308.12950)."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    joins_suffix: bool = False
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))


#: Qwen2.5-Coder and CodeGemma · StarCoder, StarCoder2, Granite code · SantaCoder · DeepSeek-Coder
#: · Code Llama · Codestral · Seed-Coder.
_KNOWN = (
    FillFormat(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    FillFormat(
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        ends=("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"),
    ),
    FillFormat(
        prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>", ends=("<fim-pad>",)
    ),
    FillFormat(prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>"),
    FillFormat(
        prefix="▁<PRE>",
        suffix="▁<SUF>",
        middle="▁<MID>",
        joins_suffix=True,
        ends=("▁<EOT>",),
    ),
    FillFormat(prefix="[PREFIX]", suffix="[SUFFIX]", suffix_first=True, ends=("[MIDDLE]",)),
    FillFormat(
        prefix="<[fim-prefix]>",
        suffix="<[fim-suffix]>",
        middle="<[fim-middle]>",
        suffix_first=True,
    ),
)

#: A word no text of a program joins to: what is encoded behind it has no start of its own.
_BEFORE = "\u263a"


def fill_format_of(tokenizer: Tokenizer) -> FillFormat | None:
    """None for a model that declares no such tokens."""
    added = tokenizer.added_tokens
    for known in _KNOWN:
        if all(mark in added for mark in known.marks):
            return known
    declared: Mapping[str, str] = tokenizer.special_tokens
    texts = [declared.get(f"{part}_token", "") for part in ("prefix", "suffix", "middle")]
    if all(text in added for text in texts):
        return FillFormat(prefix=texts[0], suffix=texts[1], middle=texts[2])
    return None


def fill_ids(tokenizer: Tokenizer, fill: FillFormat, prefix: str, suffix: str) -> list[int]:
    """The prompt without a BOS. Special tokens in both texts are honoured."""
    before = [tokenizer.added_tokens[fill.prefix], *_encode(tokenizer, prefix)]
    behind = _encode(tokenizer, suffix)
    if fill.joins_suffix:
        lead = _encode(tokenizer, _BEFORE)
        behind = _encode(tokenizer, _BEFORE + suffix)[len(lead) :]
    behind = [tokenizer.added_tokens[fill.suffix], *behind]
    ids = behind + before if fill.suffix_first else before + behind
    return [*ids, tokenizer.added_tokens[fill.middle]] if fill.middle else ids


def fill_ends(tokenizer: Tokenizer, fill: FillFormat) -> frozenset[int]:
    """Tokens behind which the middle is over: the marks themselves and the family's ends."""
    added = tokenizer.added_tokens
    return frozenset(added[text] for text in (*fill.marks, *fill.ends) if text in added)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, parse_special=True, add_bos=False)
