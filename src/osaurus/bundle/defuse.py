"""Copies of a tokenizer in which the text of control tokens is ordinary text.

A message that quotes `<|im_end|>` must not end a turn. `plain_copy` leaves the added tokens
out, which is enough for almost every vocabulary. Some could still assemble a control token
from its letters (a Unigram piece, a whole-word match); `defused_copy` renames those entries
to something no text contains.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from typing import Any

import tokenizers

_HTML = (
    "table caption thead tbody tfoot tr th td h1 h2 h3 h4 h5 h6 blockquote ul ol li p div span "
    "strong em b i u s sub sup code pre a br hr img html body head"
)
#: Added tokens that stand for ordinary text: runs of white space, and HTML as Gemma lists it.
_ORDINARY = re.compile(rf"[\s\u2581]+|</?(?:{_HTML.replace(' ', '|')})>")


def is_ordinary(token: tokenizers.AddedToken) -> bool:
    """Whether a message may contain this added token as its one id: the model was trained with
    it inside texts, and it steers nothing."""
    return not token.special and _ORDINARY.fullmatch(token.content) is not None


def plain_copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same model without its added tokens, the ordinary ones excepted.

    The model itself is shared, not copied.
    """
    plain = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    if backend.decoder is not None:
        plain.decoder = backend.decoder
    kept = [
        token
        for token in backend.get_added_tokens_decoder().values()
        # One that the model itself does not have would get another id here.
        if is_ordinary(token) and plain.token_to_id(token.content) is not None
    ]
    if kept:
        plain.add_tokens(kept)
    return plain


def defused_copy(plain: tokenizers.Tokenizer, reserved: Collection[int]) -> tokenizers.Tokenizer:
    """A copy whose vocabulary entries `reserved` match no text. Costs a full rebuild."""
    state = json.loads(plain.to_str())
    model = state["model"]
    nonce = secrets.token_hex(8)  # so that nobody can write the new name into a message

    def new_name(token_id: int) -> str:
        return f"\U0010ffff{nonce}:{token_id}"

    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score], the id is the position
        renamed: Any = [
            [new_name(i), score] if i in reserved else [piece, score]
            for i, (piece, score) in enumerate(vocab)
        ]
    else:
        gone = {text for text, i in vocab.items() if i in reserved}
        renamed = {new_name(i) if text in gone else text: i for text, i in vocab.items()}
        if "merges" in model:
            model["merges"] = [m for m in model["merges"] if not _touches(m, gone)]
    model["vocab"] = renamed
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _touches(merge: str | list[str], gone: set[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in gone or right in gone or left + right in gone
