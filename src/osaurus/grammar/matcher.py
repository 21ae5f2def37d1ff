"""One answer against one grammar: which tokens may come next, and back again with drafts.

`masks(drafts)` says for the next token, and for the one behind each draft, what the grammar
allows; `commit` what was taken; `rollback` what is taken back. Rows that need masks in one step
get them together (`compute_masks`); llguidance works on them without the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from osaurus.errors import RequestFailed
from osaurus.grammar.mask import allows
from osaurus.grammar.vocabulary import GrammarVocabulary
from osaurus.types.engine import Constraint

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Masks = NDArray[np.int32]

#: A mask that takes longer is worth the threads for the others.
SLOW_MASK_S = 0.00006


class GrammarFault(RequestFailed):
    """A grammar met one of the limits of its parser in the middle of an answer."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled, with the parser's words."""


def _limits() -> Any:
    from llguidance import LLParserLimits

    # Errors must not carry the schema or the answer into a log.
    return LLParserLimits(verbose_errors=False)


class GrammarConstraint:
    """Follows one choice; implements `types.engine.Constraint`. Used by one thread at a time."""

    __slots__ = ("end_token_ids", "mask_words", "matcher")

    def __init__(self, matcher: LLMatcher, mask_words: int, end_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.mask_words = mask_words
        self.end_token_ids = end_token_ids

    def fork(self) -> GrammarConstraint:
        """Another choice from here."""
        return GrammarConstraint(self.matcher.deep_copy(), self.mask_words, self.end_token_ids)

    @property
    def is_finished(self) -> bool:
        """The answer is whole and nothing can follow."""
        return self.matcher.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """The answer so far is whole."""
        return self.matcher.is_accepting()

    def masks(self, drafts: Sequence[int] = ()) -> Masks:
        """int32 [k + 1, ceil(V / 32)], a bit a token, for k drafts. A row behind a draft that
        the grammar forbids is all zeros, and so are those after it. Leaves the state as it was.

        Raises `GrammarFault`.
        """
        found = np.zeros((len(drafts) + 1, self.mask_words), dtype=np.int32)
        taken = 0
        for row in found:
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._check()
            if taken == len(drafts) or not allows(row, drafts[taken]):
                break
            self._consume(drafts[taken])
            taken += 1
        if taken:
            self.rollback(taken)
        return found

    def commit(self, token_id: int) -> None:
        """`token_id` became part of the answer; it must be one that the mask allowed."""
        self._consume(token_id)

    def rollback(self, count: int) -> None:
        """Take back the last `count` committed tokens."""
        self.matcher.rollback(count)
        self._check()

    def _consume(self, token_id: int) -> None:
        self.matcher.consume_token(token_id)
        self._check()

    @property
    def fault(self) -> GrammarFault | None:
        if not self.matcher.is_error():
            return None
        words = self.matcher.get_error().partition("\n")[0][:200]
        return GrammarFault(f"the grammar could not go on: {words}")

    def _check(self) -> None:
        if (fault := self.fault) is not None:
            raise fault


def compile_grammar(grammar: str, vocabulary: GrammarVocabulary) -> GrammarConstraint:
    """A constraint at the beginning of `grammar`, as llguidance spells it. Takes about a
    millisecond, hundreds of them for the largest schemas. Raises `GrammarError`."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.tokenizer(), grammar, log_level=0, limits=_limits())
    if not matcher.is_error():
        # Some faults of an expression show only when it is first used.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error().strip()[:500])
    return GrammarConstraint(matcher, vocabulary.mask_words, vocabulary.end_token_ids)


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


def compute_masks(constraints: Sequence[Constraint]) -> list[Masks | Exception]:
    """The next token's mask of each constraint, int32 [ceil(V / 32)], or what it failed with.

    A mask takes 5 to 50 us while the tables are in the processor's cache, less than a thread
    needs to wake; behind a forward they are not. Where the first was slow the others are made in
    parallel.
    """
    found: list[Masks | Exception] = []
    for i, constraint in enumerate(constraints):
        begin = time.perf_counter()
        found.append(_mask_or_fault(constraint))
        rest = constraints[i + 1 :]
        if len(rest) > 1 and time.perf_counter() - begin > SLOW_MASK_S:
            return found + _in_parallel(rest)
    return found


def _mask_or_fault(constraint: Constraint) -> Masks | Exception:
    try:
        return constraint.masks(())[0]
    except Exception as fault:  # noqa: BLE001 - it becomes that request's error
        return fault


def _in_parallel(constraints: Sequence[Constraint]) -> list[Masks | Exception]:
    grammars = [each for each in constraints if isinstance(each, GrammarConstraint)]
    if len(grammars) < len(constraints):
        return [_mask_or_fault(each) for each in constraints]
    words = grammars[0].mask_words
    found = np.zeros((len(grammars), words), dtype=np.int32)
    _executor().unsafe_compute_mask_ptr(
        [(each.matcher, i) for i, each in enumerate(grammars)],
        found.ctypes.data,
        words * found.itemsize,
        len(grammars),
    )
    return [each.fault or row for each, row in zip(grammars, found, strict=True)]
