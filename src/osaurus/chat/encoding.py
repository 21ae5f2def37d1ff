"""A rendered prompt to token ids: the template's markup as control tokens, clients' text as text.

In: the runs that the guard tells apart. Out: ids with one BOS at most, and the text that decides
where the answer starts. Refuses a text that no context could hold before encoding all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from osaurus.chat.guard import Run
from osaurus.errors import ContextLengthExceeded
from osaurus.parsing.reasoning import TAIL_TOKENS
from osaurus.runtime.model import PromptModel, Tokenizer

#: Ordinary text has 3 to 5 characters a token. One with more for every token of the context is
#: counted in slices before it is encoded, and refused once it has filled that many contexts.
_SUSPICIOUS_CHARACTERS_PER_TOKEN = 16
_HOPELESS_CONTEXTS = 4
_SLICE_CHARACTERS = 65536


def refuse_hopeless(model: PromptModel, text: str) -> None:
    """Raises `ContextLengthExceeded` for a text several times too long, without encoding all
    of it: that takes a second a megabyte. The number of tokens is then an estimate."""
    context = model.context_tokens
    if len(text) <= _SUSPICIOUS_CHARACTERS_PER_TOKEN * context:
        return
    num_tokens = 0
    for end in range(_SLICE_CHARACTERS, len(text) + _SLICE_CHARACTERS, _SLICE_CHARACTERS):
        piece = text[end - _SLICE_CHARACTERS : end]
        num_tokens += len(model.tokenizer.encode(piece, parse_special=True, add_bos=False))
        if num_tokens > _HOPELESS_CONTEXTS * context:
            raise ContextLengthExceeded(round(num_tokens * len(text) / end), context)


def encode_runs(tokenizer: Tokenizer, runs: Sequence[Run]) -> tuple[list[int], str]:
    """Ids with exactly one BOS where the bundle wants one or its template wrote any, and the
    text of the last ids without what clients wrote."""
    ids: list[int] = []
    own: list[bool] = []
    for run in runs:
        ids += tokenizer.encode(run.text, parse_special=not run.is_plain, add_bos=False)
        own += [not run.is_plain] * (len(ids) - len(own))
    first_of_tail = max(0, len(ids) - TAIL_TOKENS)
    tail = b"".join(
        tokenizer.token_bytes(token_id) if is_own else b"\0"
        for token_id, is_own in zip(ids[first_of_tail:], own[first_of_tail:], strict=True)
    ).decode("utf-8", "replace")
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids, tail
    first = next((i for i, token_id in enumerate(ids) if token_id != bos), len(ids))
    return ([bos, *ids[first:]] if first or tokenizer.add_bos_to_chat else ids), tail
