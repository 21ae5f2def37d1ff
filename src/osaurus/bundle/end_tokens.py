"""Which token ids end an answer: the union of what a bundle's files and its template say.

Bundles disagree with themselves: one file names two end tokens, another one, and the turn's
real end may be known to the chat template only. Missing one makes a model talk to itself, so
all are taken. Ids and texts in, one set out; nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

#: Ends of turn or text that many bundles fail to declare.
END_TOKEN_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "〈|EOS|〉",
    "<｜end▁of▁sentence｜>",
    "<|EOT|>",
)
#: DeepSeek's end of sentence where it is no token: as text, and as such models cut it off.
_END_OF_SENTENCE = "<｜end▁of▁sentence｜>"
_END_OF_SENTENCE_TEXTS = (_END_OF_SENTENCE, "<｜end▁of▁sentence>", "<｜end▁of▁sent")
_HARMONY_TEXTS = ("<|channel|>", "<|message|>", "<|return|>")
_PROBE = "7f3a"  #: an answer that no template contains


class _Vocabulary(Protocol):
    unk_token_id: int | None
    eos_token_id: int | None
    special_tokens: Mapping[str, str]

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    def id_of(self, text: str) -> int | None: ...


def declared_ids(*values: Any) -> set[int]:
    """Ids from `eos_token_id` entries: a number, a list, or nothing; anything else is skipped."""
    found: set[int] = set()
    for value in values:
        items = value if isinstance(value, (list, tuple)) else [value]
        found.update(item for item in items if type(item) is int and item >= 0)
    return found


def end_token_ids(
    tokenizer: _Vocabulary, declared: Iterable[int], turn_end: int | None
) -> frozenset[int]:
    """Union of the declared ids, the tokenizer's end and unknown tokens, the template's turn
    end and every built-in end text that the vocabulary has.

    In a harmony-shaped vocabulary `<|end|>` separates channels: where the bundle declares
    ids without it, stopping on it would cut every answer short.
    """
    declared = set(declared)
    ends = set(declared)
    ends.update(
        i for i in (tokenizer.eos_token_id, tokenizer.unk_token_id, turn_end) if i is not None
    )
    known = {text: tokenizer.id_of(text) for text in END_TOKEN_TEXTS}
    ends.update(i for i in known.values() if i is not None)
    separator = known["<|end|>"]
    is_harmony = all(tokenizer.id_of(text) is not None for text in _HARMONY_TEXTS)
    if is_harmony and declared and separator is not None and separator not in declared:
        ends.discard(separator)
    return frozenset(ends)


def stop_texts(tokenizer: _Vocabulary, configured: Any, template: str | None) -> tuple[str, ...]:
    """Texts that end an answer: what `stop_strings` lists, and declared ends without an id.

    Entries of the built-in list that the vocabulary lacks are no stops, except the end of
    sentence in a bundle whose template writes it.
    """
    items = configured if isinstance(configured, (list, tuple)) else [configured]
    texts = [item for item in items if isinstance(item, str) and item]
    declared = tokenizer.special_tokens.get("eos_token")
    if declared is not None and tokenizer.id_of(declared) is None:
        texts.append(declared)
    if _END_OF_SENTENCE in (template or "") and tokenizer.id_of(_END_OF_SENTENCE) is None:
        texts.extend(_END_OF_SENTENCE_TEXTS)
    return tuple(dict.fromkeys(texts))


def turn_end_of_template(
    render: Callable[[list[dict[str, Any]]], str], added_tokens: Mapping[str, int]
) -> int | None:
    """The added token that the template writes right after an assistant's answer.

    `render` gives the text of a conversation without a generation prompt. None when the
    answer is followed by nothing or by ordinary text.
    """
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": _PROBE},
    ]
    _, found, tail = render(messages).rpartition(_PROBE)
    tail = tail.lstrip() if found else ""
    matches = [text for text in added_tokens if text and tail.startswith(text)]
    return added_tokens[max(matches, key=len)] if matches else None
