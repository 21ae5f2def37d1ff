"""A model's tokens as llguidance wants them: exact bytes, which are control tokens, which end.

Made from what the tokenizer says of every id, so that byte-level, SentencePiece and GGUF
vocabularies are one case. Built at first use, which takes 0.1 to 1 s; one for a loaded model.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Tokens(Protocol):
    """The tokenizer's side."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def encode(self, text: str, *, parse_special: bool, add_bos: bool) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class GrammarVocabulary:
    """Safe to use from any thread. The lock is held while the tables are built: a second
    request waits for the first's.

    `end_token_ids` end an answer; a mask holds them exactly where the grammar accepts. A model
    that has none gets one past its vocabulary, which it can never write.
    """

    def __init__(self, tokens: Tokens, end_token_ids: Collection[int]) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._built: LLTokenizer | None = None
        self._given_ends = end_token_ids

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        size = self._tokens.vocab_size
        return frozenset(i for i in self._given_ends if 0 <= i < size) or frozenset({size})

    @property
    def size(self) -> int:
        """Tokens of a mask."""
        return max(self._tokens.vocab_size, max(self.end_token_ids) + 1)

    @property
    def mask_words(self) -> int:
        """int32 words of one mask."""
        return (self.size + 31) // 32

    def tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

    def _build(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        table = _Table(self._tokens, self.end_token_ids)
        return LLTokenizer(
            TokenizerWrapper(table),
            n_vocab=self.size,
            eos_token=sorted(self.end_token_ids),
        )

    @cached_property
    def _control_texts(self) -> list[tuple[str, int]]:
        """Texts of control tokens, longest first."""
        special = frozenset(self._tokens.special_ids) | self.end_token_ids
        found = [(text, i) for text, i in self._tokens.added_tokens.items() if i in special]
        return sorted(found, key=lambda each: -len(each[0]))

    def literal(self, text: str) -> str:
        """`text` as an expression of a grammar, the control tokens in it by their ids.

        Text never matches a control token in a grammar, nor the other way round.
        """
        parts: list[str] = []
        rest = text
        while rest:
            start, marker, token_id = min(
                (
                    (rest.find(marker), marker, token_id)
                    for marker, token_id in self._control_texts
                    if marker in rest
                ),
                key=lambda each: (each[0], -len(each[1])),
                default=(len(rest), "", -1),
            )
            if start:
                parts.append(quoted(rest[:start]))
            if marker:
                parts.append(f"<[{token_id}]>")
            rest = rest[start + len(marker) :]
        return " ".join(parts)

    def control_id(self, text: str) -> int | None:
        """The id of the control token that `text` is, if it is one."""
        return next((i for marker, i in self._control_texts if marker == text), None)


def quoted(text: str) -> str:
    """A text as a string of the grammar notation."""
    return json.dumps(text, ensure_ascii=False)


class _Table:
    """What `TokenizerWrapper` asks for. `__call__` spells forced text with the tokens that the
    tokenizer itself would take."""

    def __init__(self, tokens: Tokens, end_token_ids: frozenset[int]) -> None:
        self._source = tokens
        self.tokens = [tokens.token_bytes(i) for i in range(tokens.vocab_size)]
        if max(end_token_ids) == len(self.tokens):
            self.tokens.append(b"<end>")
        self._special = frozenset(tokens.special_ids) | end_token_ids
        self.special_token_ids = sorted(i for i in self._special if i < len(self.tokens))
        self.eos_token_id = min(end_token_ids)
        self.bos_token_id = None
        self._by_bytes = {
            data: i for i, data in enumerate(self.tokens) if data and i not in self._special
        }
        self._longest = max(map(len, self._by_bytes), default=1)
        # Forced text is mostly a schema's own, over and over.
        self._spelled = lru_cache(maxsize=4096)(self._spell)

    def __call__(self, data: bytes) -> Sequence[int]:
        return self._spelled(data)

    def _spell(self, data: bytes) -> Sequence[int]:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._greedy(data)
        # A vocabulary of SentencePiece puts a blank before a text: behind a line it does not.
        for lead in ("", "\n"):
            ids: list[Any] = self._source.encode(lead + text, parse_special=True, add_bos=False)
            while lead and ids and lead.startswith(found := self.tokens[ids[0]].decode("latin-1")):
                lead = lead.removeprefix(found)
                ids = ids[1:]
            spelled = b"".join(self.tokens[i] for i in ids)
            if not lead and spelled == data and self._special.isdisjoint(ids):
                return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place; bytes that no token spells are left out."""
        ids: list[int] = []
        place = 0
        while place < len(data):
            for length in range(min(self._longest, len(data) - place), 0, -1):
                found = self._by_bytes.get(data[place : place + length])
                if found is not None:
                    ids.append(found)
                    break
            else:
                length = 1
            place += length
        return ids
