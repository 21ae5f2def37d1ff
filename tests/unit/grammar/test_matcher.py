"""Claims: masks hold exactly what the grammar allows; a state taken back is the state that was;
control tokens are no text; a vocabulary of any kind is spelled by its bytes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from api.scripted_engine import ByteTokenizer
from osaurus.grammar import matcher as matcher_module
from osaurus.grammar.matcher import (
    GrammarConstraint,
    GrammarError,
    GrammarFault,
    compile_grammar,
    compute_masks,
)
from osaurus.grammar.text import GrammarText, regex_literal
from osaurus.grammar.vocabulary import GrammarVocabulary

WORDS = ('{"', '":', '"a"', "<think>", "</think>", "12")
TOKENIZER = ByteTokenizer(others=WORDS)
END = TOKENIZER.added_tokens["<|im_end|>"]
VOCABULARY = GrammarVocabulary(TOKENIZER, [END])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def constraint(expression: Any = None, vocabulary: GrammarVocabulary = VOCABULARY) -> Any:
    text = GrammarText(vocabulary)
    start = text.json(SCHEMA) if expression is None else expression(text)
    return compile_grammar(text.finished(start), vocabulary)


def allowed(row: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def next_of(found: GrammarConstraint) -> list[int]:
    return allowed(found.masks()[0])


def feed(found: GrammarConstraint, text: str) -> None:
    for token in TOKENIZER.encode(text, parse_special=True, add_bos=False):
        found.commit(token)


def test_a_mask_has_a_bit_for_every_token_and_the_end_only_where_the_grammar_accepts() -> None:
    found = constraint(lambda text: text.terminal("/[0-9]{1,3}/"))
    assert found.masks().shape == (1, VOCABULARY.mask_words)
    twelve = TOKENIZER.added_tokens["12"]
    assert next_of(found) == [*range(48, 58), twelve]
    feed(found, "1")
    assert found.is_accepting
    assert next_of(found) == [*range(48, 58), END, twelve]
    feed(found, "23")
    assert found.is_finished
    assert next_of(found) == [END]


def test_drafts_get_the_masks_that_committing_them_would_give() -> None:
    rng = random.Random(11)
    for _ in range(30):
        found, walked = constraint(), constraint()
        drafts: list[int] = []
        rows: list[list[int]] = [next_of(walked)]
        for _ in range(rng.randrange(1, 9)):
            token = rng.choice(rows[-1])
            if token == END:
                break
            drafts.append(token)
            walked.commit(token)
            rows.append(next_of(walked))
        masks = found.masks(drafts)
        assert [allowed(row) for row in masks] == rows
        assert next_of(found) == rows[0], "the state is left as it was"


def test_behind_a_forbidden_draft_nothing_is_allowed() -> None:
    found = constraint()
    first = next_of(found)[0]
    masks = found.masks([first, 7, first])
    assert allowed(masks[1])
    assert not masks[2:].any()
    assert next_of(found)[0] == first


def test_rollback_returns_to_the_state_before() -> None:
    found = constraint()
    states: list[list[int]] = []
    tokens = TOKENIZER.encode('{"a":12,"b":"xyz"}', parse_special=True, add_bos=False)
    for token in tokens:
        states.append(next_of(found))
        found.commit(token)
    assert found.is_finished
    for count in (1, 3, 5):
        found.rollback(count)
        del states[len(states) - count + 1 :]
        assert next_of(found) == states.pop()
        assert not found.is_finished
    fresh = constraint()
    assert next_of(fresh.fork()) == next_of(fresh)


def test_a_fork_goes_its_own_way() -> None:
    first = constraint(lambda text: text.rule('"ab" | "cd"'))
    second = first.fork()
    first.commit(ord("a"))
    assert next_of(first) == [ord("b")]
    assert next_of(second) == [ord("a"), ord("c")]


def test_control_tokens_are_no_text_and_text_is_no_control_token() -> None:
    found = constraint(lambda text: f"{text.terminal('/(?s:.*)/')} {text.literal('<|im_start|>')}")
    control = TOKENIZER.added_tokens["<|im_start|>"]
    others = TOKENIZER.special_ids - {control}
    assert control in next_of(found)
    assert not others & set(next_of(found))
    feed(found, "x")
    found.commit(control)
    assert found.is_finished
    spelled = constraint(lambda text: text.literal("<|im_start|>"))
    assert next_of(spelled) == [control]
    assert TOKENIZER.added_tokens["<think>"] in next_of(constraint(lambda t: t.literal("<think>")))


def test_text_ends_at_the_first_end_and_may_hold_none_of_it() -> None:
    for ends in (["</think>"], ["<|im_start|>"], ["<|im_start|>", "</think>"]):
        found = constraint(lambda text, ends=ends: f'{text.text_until(ends)} "!"')
        feed(found, "a<b</thin")
        feed(found, "x")
        for token in TOKENIZER.encode(ends[0], parse_special=True, add_bos=False):
            found.commit(token)
        assert next_of(found) == [ord("!")]
    spelled = constraint(lambda text: f'{text.text_until(["<|im_start|>"])} "!"')
    for byte in b"<|im_start|":
        spelled.commit(byte)
    assert ord(">") not in next_of(spelled), "ordinary tokens must not spell the marker"


def test_a_token_that_is_not_allowed_is_a_fault_that_stays() -> None:
    found = constraint()
    with pytest.raises(GrammarFault, match="could not go on"):
        found.commit(7)
    with pytest.raises(GrammarFault):
        found.masks()


def test_faults_do_not_quote_the_answer() -> None:
    found = constraint()
    feed(found, '{"a":12,"b":"secret')
    with pytest.raises(GrammarFault) as caught:
        found.commit(10)
    assert "secret" not in str(caught.value)


def test_a_grammar_that_does_not_compile_is_refused() -> None:
    with pytest.raises(GrammarError, match="unknown name"):
        constraint(lambda text: "nothing")


@pytest.mark.parametrize("slow", [False, True])
def test_masks_made_together_are_those_made_alone(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        monkeypatch.setattr(matcher_module, "SLOW_MASK_S", -1.0)
    rng = random.Random(3)
    found = [constraint() for _ in range(6)]
    found.append(constraint(lambda text: text.terminal(regex_literal(r"\d+/x"))))
    for each in found:
        for _ in range(rng.randrange(6)):
            if not each.is_finished:
                each.commit(rng.choice([t for t in next_of(each) if t != END]))
    broken = constraint()
    with pytest.raises(GrammarFault):
        broken.commit(7)
    rows = compute_masks([*found, broken])
    assert isinstance(rows[-1], GrammarFault)
    for each, row in zip(found, rows, strict=False):
        assert (each.masks()[0] == row).all()


def test_a_model_without_an_end_token_ends_where_the_grammar_does() -> None:
    vocabulary = GrammarVocabulary(TOKENIZER, [])
    assert vocabulary.end_token_ids == {TOKENIZER.vocab_size}
    found = constraint(lambda text: text.terminal("/[0-9]{1,2}/"), vocabulary)
    found.commit(ord("1"))
    assert TOKENIZER.vocab_size in next_of(found)
    found.commit(ord("2"))
    assert found.is_finished


class PieceTokenizer:
    """SentencePiece's habit: a blank is put before every text."""

    pieces = (b"", b" a", b"a", b"b", b"\n", b" ", b"ab", b"\xc3", b"\xa9", b" ab")
    vocab_size = len(pieces)
    added_tokens: Mapping[str, int] = MappingProxyType({})
    special_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def encode(self, text: str, *, parse_special: bool, add_bos: bool) -> list[int]:
        rest, ids = b" " + text.encode(), []
        while rest:
            found = [piece for piece in self.pieces if piece and rest.startswith(piece)]
            best = max(found, key=len, default=b"")
            ids.append(self.pieces.index(best))
            rest = rest[max(1, len(best)) :]
        return ids


def test_forced_text_is_spelled_as_the_tokenizer_would_inside_a_text() -> None:
    vocabulary = GrammarVocabulary(PieceTokenizer(), [0])
    found = constraint(lambda text: text.literal("ab"), vocabulary)
    row = allowed(found.masks()[0])
    assert row == [6], "the one token without the blank"
    spelled = constraint(lambda text: text.literal("é"), vocabulary)
    assert allowed(spelled.masks()[0]) == [7], "bytes where there is no token"
