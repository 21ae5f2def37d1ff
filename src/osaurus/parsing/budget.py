"""A ceiling on thinking, in tokens: what the sampler must force or forbid next.

Bookkeeping over token ids only; applying it to logits is the sampler's. Below the ceiling
nothing is touched. At the ceiling the closer is forced, once; from then on only reopening a
block is forbidden.

    outside --opener--> inside --ceiling reached--> due --closer--> spent
    inside --closer--> outside                      (tokens of several blocks add up)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from osaurus.parsing.reasoning import REASONING_FORMATS, Start


class ThinkingBudget:
    """Follows one choice. `observe` each sampled token, then look at `forced` and `banned`.

    `has_fired` is for the response's report.
    """

    __slots__ = ("_closers", "_is_inside", "_limit", "_num_thought", "_openers", "has_fired")

    def __init__(
        self, limit: int, *, openers: frozenset[int], closers: Sequence[int], inside: bool
    ) -> None:
        self._limit = limit
        self._openers = openers
        self._closers = tuple(closers)
        self._is_inside = inside
        self._num_thought = 0
        self.has_fired = False

    def observe(self, token_id: int) -> None:
        self.has_fired = self.has_fired or self.forced is not None
        if token_id in self._closers:
            self._is_inside = False
        elif self._is_inside:
            self._num_thought += 1
        elif token_id in self._openers:
            self._is_inside = True

    @property
    def forced(self) -> int | None:
        """The one token that may come next, or None."""
        is_due = self._is_inside and self._num_thought >= self._limit
        return self._closers[0] if is_due else None

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not come next: openers, once the ceiling was reached."""
        is_spent = not self._is_inside and self._num_thought >= self._limit
        return self._openers if is_spent else frozenset()


def arm_budget(
    limit: int,
    reasoning: str | None,
    *,
    start: Start,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> ThinkingBudget | None:
    """A budget for a reasoning format, or None when it cannot be enforced.

    Enforcing needs a closer that is one token: the tokenizer has to map its text to a single
    id (`encode` adds nothing around it, and knows special tokens) and that id back to the text.
    """
    envelope = REASONING_FORMATS.get(reasoning or "")
    if envelope is None:
        return None

    def single(marker: str) -> list[int]:
        ids = list(encode(marker))
        return ids if len(ids) == 1 and decode(ids) == marker else []

    closers = [token_id for marker in envelope.closers for token_id in single(marker)]
    if not closers:
        return None
    openers = frozenset(token_id for marker in envelope.openers for token_id in single(marker))
    return ThinkingBudget(
        limit, openers=openers, closers=closers, inside=start is not Start.CONTENT
    )
