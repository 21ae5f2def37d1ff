"""Texts to vectors: what is asked for, what comes back, and what a runtime sees of a model that
makes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """One call, whatever protocol it came by. Every protocol hands it to `ChatEngine.embed`.

    An input is a text, or token ids that are taken as they are: nothing is put around them.
    With `truncate` a text over the model's limit is cut at its end, otherwise it is refused.
    `dimensions` keeps the first so many numbers of each vector and scales it to length one.
    """

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    truncate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """One float32 vector (`array("f")`: iterable, `tobytes()` is its wire form) and one count
    of tokens for each input, in order. The counts are what the model read, its own marks at a
    text's ends included."""

    model_id: str
    vectors: tuple[array[float], ...]
    token_counts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.token_counts)


class EmbeddingJob(Protocol):
    """Vectors under way."""

    done: Future[list[array[float]]]  #: ends when nothing of the job is computed any more

    def cancel(self) -> None:
        """Stop before the next text. `done` then ends with `Cancelled`. Idempotent."""
        ...


class Embedder(Protocol):
    """An engine that makes vectors. Jobs run one after another; a text's vector does not
    depend on the texts beside it, to the bit."""

    @property
    def dimensions(self) -> int:
        """Numbers of a vector."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """The longest text, marks at its ends included."""
        ...

    @property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids that go before and behind a text: BERT's [CLS] and [SEP]."""
        ...

    def start(self, inputs: Sequence[Sequence[int]]) -> EmbeddingJob:
        """Queue token ids, each at least one and at most `max_tokens` long. From any thread."""
        ...
