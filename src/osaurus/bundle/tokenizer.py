"""Text to token ids and back, for one bundle, whatever files its vocabulary came from.

A thin, thread-safe face over the `tokenizers` library that adds three promises: text of
control and added tokens stays text unless the caller asks otherwise; every id has exact
bytes; a BOS is never doubled. Where a vocabulary comes from: `tokenizer_files.py` and
`gguf_tokenizer.py`. Knows nothing of chat templates or of incremental decoding.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import tokenizers

from osaurus.bundle.defuse import defused_copy, is_ordinary, plain_copy

Alphabet = Literal["byte_level", "sentencepiece", "plain"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 stands for itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_alphabet()
#: How a byte is written in a byte-level vocabulary.
BYTE_ALPHABET = {byte: char for char, byte in _BYTE_OF.items()}


class Tokenizer:
    """Immutable after construction; any number of threads may call it.

    The lock guards one rare lazy construction (`_defused`); encoding takes no lock.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        alphabet: Alphabet,
        texts: Sequence[str] | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        unk_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        add_bos: bool = False,
        add_bos_to_chat: bool = False,
        strips_leading_space: bool = False,
    ) -> None:
        """`backend` holds the added tokens; `texts` gives each id's stored text where the
        backend cannot (a vocabulary with the same text twice)."""
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._alphabet: Alphabet = alphabet
        self._texts = texts
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_tokens = MappingProxyType({t: i for i, t in self._added_text.items()})
        self._vocab_size = len(texts) if texts else backend.get_vocab_size(with_added_tokens=True)
        self._bytes: list[bytes | None] = [None] * self._vocab_size
        self._plain = plain_copy(backend)
        # What plain text must never become. Unknown characters do legitimately become `unk`.
        self._reserved = frozenset(
            i for i, token in added.items() if not is_ordinary(token) and i != unk_token_id
        )
        self._defused: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.unk_token_id = unk_token_id
        #: `bos_token`, `eos_token`, ... -> text, as chat templates expect them.
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        #: Whether a raw prompt starts with BOS.
        self.add_bos = add_bos and bos_token_id is not None
        #: Whether a rendered chat gets a BOS that its template did not write. GGUF says so for
        #: both; Hugging Face templates are complete and only raw prompts get one.
        self.add_bos_to_chat = add_bos_to_chat and bos_token_id is not None
        #: Encoding put a space before the text, so the first decoded one is not the text's.
        self.strips_leading_space = strips_leading_space

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Text to id of every token that is matched before the vocabulary."""
        return self._added_tokens

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: what `decode(skip_special=True)` leaves out."""
        return self._special_ids

    @property
    def alphabet(self) -> Alphabet:
        """How stored token texts stand for bytes."""
        return self._alphabet

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`.

        `parse_special=False`: the text of control and added tokens becomes ordinary tokens
        (those that stand for ordinary text, such as runs of white space, keep their ids).
        `True`: each such text becomes its one id. `add_bos` puts BOS in
        front unless the text already starts with it; pass `self.add_bos` for the bundle's rule.
        """
        if parse_special:
            ids = _ids(self._backend, text)
        else:
            ids = _ids(self._plain, text)
            if not self._reserved.isdisjoint(ids):
                ids = _ids(self._without_reserved(), text)
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    @property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer's own post-processing puts before and behind one text: [CLS] and
        [SEP] of BERT. Empty where it puts nothing."""
        bare, framed = _ids(self._backend, "a"), self._backend.encode("a").ids
        for start in range(len(framed) - len(bare) + 1):
            end = start + len(bare)
            if framed[start:end] == bare:
                return tuple(framed[:start]), tuple(framed[end:])
        return (), ()

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`, without clean-up; incomplete UTF-8 becomes U+FFFD."""
        kept = [i for i in ids if not (skip_special and i in self._special_ids)]
        if self._alphabet == "plain":
            return self._backend.decode(kept, skip_special_tokens=False)
        data = b"".join(map(self.token_bytes, kept))
        if self.strips_leading_space and kept and kept[0] not in self._added_text:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; added tokens give the bytes of their text.

        An id without a text stands for no bytes: padding of the vocabulary, which a model may
        have rows for beyond the tokenizer's own. Raises `IndexError` for a negative one.
        """
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        if token_id >= len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        if (text := self._added_text.get(token_id)) is not None:
            return text.encode()
        text = self._stored_text(token_id)
        if self._alphabet == "byte_level":
            if all(char in _BYTE_OF for char in text):
                return bytes(_BYTE_OF[char] for char in text)
            return text.encode()
        if self._alphabet == "sentencepiece":
            if match := _BYTE_TOKEN.fullmatch(text):
                return bytes([int(match[1], 16)])
            return text.replace(_SPACE_MARK, " ").encode()
        return text.removeprefix("##").encode()

    def _stored_text(self, token_id: int) -> str:
        if self._texts is not None:
            return self._texts[token_id]
        return self._backend.id_to_token(token_id) or ""

    def id_of(self, text: str) -> int | None:
        """The id of the token stored as `text`: an added token or a vocabulary entry."""
        return self._backend.token_to_id(text)

    def text_of(self, token_id: int) -> str:
        """What a token looks like, for people and logs; partial UTF-8 shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """The tokenizer.json form, for libraries that build on it (grammars)."""
        return self._backend.to_str()

    def _without_reserved(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._defused is None:
                self._defused = defused_copy(self._plain, self._reserved)
            return self._defused


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except (TypeError, UnicodeEncodeError):
        # Half of a surrogate pair, which JSON can carry and UTF-8 cannot.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return backend.encode(whole, add_special_tokens=False).ids
