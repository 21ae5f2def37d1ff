"""What the cache knows of one request: its namespace, its chain of digests, its progress."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from osaurus.cache.key import ROOT, block_digest, generated_digest
from osaurus.types.events import CacheDetail

if TYPE_CHECKING:
    from osaurus.cache.records import Record


@dataclass(slots=True, eq=False, kw_only=True)
class CachedSequence:
    """Owned by the engine's thread.

    `exact_until` is the first token whose keys and values a cold request might not have bit
    for bit: those of decode rows, and all that follow a block which decode rows made.
    """

    namespace: bytes
    serial: int
    block_tokens: int
    prompt_tokens: int
    exact_until: int
    boundaries: tuple[int, ...] = ()  #: tokens after which prefill takes a snapshot of state
    lasting: tuple[int, ...] = ()  #: of those, ends that later prompts are likely to pass
    digests: list[bytes] = field(default_factory=list)
    labelled: int = 0  #: blocks that were offered to the index
    proven: int = 0  #: of those, blocks whose values are known to be finite
    unproven_snapshots: list[bytes] = field(default_factory=list)  #: keys of those it took
    matched_tokens: int = 0  #: of the prompt, taken over at admission or later
    reached_tokens: int = 0  #: as far as that was counted
    detail: CacheDetail = "miss"
    record_keys: list[str] = field(default_factory=list)  #: still to be read from disk
    reading: Future[Record | None] | None = None  #: the first of them, if it is being read
    reading_since: float = 0.0  #: monotonic seconds
    read_keys: list[str] = field(default_factory=list)  #: read for this request

    is_handed_over: bool = False  #: to the disk already, while it runs
    is_off: bool = False  #: the model has no cache

    @classmethod
    def off(cls, block_tokens: int) -> CachedSequence:
        return cls(
            namespace=b"",
            serial=0,
            block_tokens=block_tokens,
            prompt_tokens=0,
            exact_until=0,
            detail="disabled",
            is_off=True,
        )

    def sibling(self, serial: int) -> CachedSequence:
        """Another choice of the same prompt, before either has begun."""
        return replace(
            self,
            serial=serial,
            digests=list(self.digests),
            unproven_snapshots=[],
            record_keys=[],
            read_keys=[],
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """Digests for every full block of `tokens`, the sequence from its start."""
        size = self.block_tokens
        for start in range(len(self.digests) * size, len(tokens) - size + 1, size):
            self.append(tokens[start : start + size])

    def append(self, tokens: Sequence[int]) -> None:
        """The digest of the next block, which holds `tokens`."""
        parent = self.digests[-1] if self.digests else ROOT
        self.digests.append(block_digest(self.namespace, parent, tokens))

    def forked_from(self, source: CachedSequence, num_tokens: int) -> None:
        """The request shares the first `num_tokens` of a sibling of the same prompt."""
        if self.is_off:
            return
        self.exact_until = min(self.exact_until, source.exact_until)
        self.labelled = num_tokens // self.block_tokens
        self.matched_tokens, self.detail = source.matched_tokens, source.detail

    def is_answer(self, index: int) -> bool:
        """Whether a block reaches beyond what prefill feeds: decode rows made its end."""
        return (index + 1) * self.block_tokens > self.prompt_tokens - 1

    def exact_key(self, index: int) -> bytes:
        return self.digests[index]

    def generated_key(self, index: int) -> bytes:
        return generated_digest(self.digests[index])

    def own_key(self, index: int) -> bytes:
        """The key under which this request's own block is kept."""
        exact = (index + 1) * self.block_tokens <= self.exact_until
        return self.exact_key(index) if exact else self.generated_key(index)
