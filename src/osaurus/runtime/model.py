"""What the runtime hands out: one resident model, and the little it needs to know of a bundle.

Values and protocols only. `chat/` sees a model through these and never opens a bundle itself,
so that everything it reads comes from the folder that was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from osaurus.grammar.vocabulary import GrammarVocabulary
from osaurus.runtime.conventions import Conventions
from osaurus.types.embeddings import Embedder
from osaurus.types.engine import Engine


class Listing(Protocol):
    """A model found on disk, not opened."""

    @property
    def model_id(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def modified(self) -> datetime: ...

    @property
    def size_bytes(self) -> int:
        """Of the weights as stored: what a load will take at least."""
        ...

    @property
    def context(self) -> int:
        """Tokens that the files say the model was made for; 0 where they do not."""
        ...

    @property
    def is_embedder(self) -> bool:
        """It makes vectors of texts and writes none."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back to bytes. Safe to call from any thread."""

    bos_token_id: int | None
    add_bos: bool  #: a raw prompt starts with BOS
    add_bos_to_chat: bool  #: a rendered chat gets a BOS that its template did not write

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts by the bundle's own names: `eos_token`, `prefix_token`, ..."""
        ...

    @property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the tokenizer itself puts before and behind a text."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, parse_special: bool, add_bos: bool) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Template(Protocol):
    """A bundle's chat template. `render` raises `TemplateError` with the template's words."""

    @property
    def source(self) -> str: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str: ...

    def check(self) -> None:
        """Compile now; raises `TemplateError` when it cannot be rendered at all."""
        ...

    def within(self, timeout_s: float) -> Template:
        """The same template with less time for a render."""
        ...


class PromptModel(Protocol):
    """What a prompt is made with: files of a model, no weights."""

    @property
    def model_id(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> Template | None: ...
    @property
    def conventions(self) -> Conventions: ...
    @property
    def needs_stable_boundary(self) -> bool: ...
    @property
    def control_texts(self) -> tuple[str, ...]: ...
    @property
    def context_tokens(self) -> int: ...


def control_texts_of(tokenizer: Tokenizer, template: Template | None) -> tuple[str, ...]:
    """Texts of the added tokens that only the template may write: all special ones, and those
    that it uses as markup, such as `<think>`. The others stay what they are for the model, text
    with a token of its own: some vocabularies hold line breaks and HTML tags that way."""
    source = "" if template is None else template.source
    special = frozenset(tokenizer.special_ids)
    return tuple(
        text
        for text, token_id in tokenizer.added_tokens.items()
        if token_id in special or (text in source and not text.isspace())
    )


def _admit_all() -> None:
    """For models that no files speak for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One resident model: the engine that serves it now, and what was read from its bundle.

    `sampling_defaults` holds the bundle's own values by field name of `SamplingParams`,
    already checked. `stop_texts` end an answer as a request's own stop strings do.
    `needs_stable_boundary`: the cache can resume some layer only where it kept a snapshot, so
    it wants to know where a prompt's system part ends. `admit` raises `BundleError` once the
    bundle's own files say that it must not be used; it is asked for every request.
    """

    model_id: str
    engine: Engine
    tokenizer: Tokenizer
    template: Template | None
    eos_token_ids: frozenset[int] = frozenset()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    size_bytes: int = 0
    conventions: Conventions = field(default_factory=Conventions)
    stop_texts: tuple[str, ...] = ()
    needs_stable_boundary: bool = False
    admit: Callable[[], object] = _admit_all
    embedder: Embedder | None = None  #: set for a model that makes vectors and writes no text
    device: str = "cpu"  #: where its weights are
    control_texts: tuple[str, ...] = field(init=False, repr=False)
    #: The tokens as grammars need them, built by the first request that has one.
    vocabulary: GrammarVocabulary = field(init=False, repr=False)

    def __post_init__(self) -> None:
        texts = control_texts_of(self.tokenizer, self.template)
        object.__setattr__(self, "control_texts", texts)
        vocabulary = GrammarVocabulary(self.tokenizer, self.eos_token_ids)
        object.__setattr__(self, "vocabulary", vocabulary)

    @property
    def context_tokens(self) -> int:
        return self.engine.max_context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadedModel:
    """A model as its files say, for prompts that are counted and not run."""

    model_id: str
    tokenizer: Tokenizer
    template: Template | None
    conventions: Conventions
    context_tokens: int
    needs_stable_boundary: bool = False
    control_texts: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        texts = control_texts_of(self.tokenizer, self.template)
        object.__setattr__(self, "control_texts", texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContainer:
    """What a load leaves in memory: weights that engines are built on, and the bundle's facts.

    `make_engine` takes a batch size and blocks; one engine exists at a time. `max_batch_size`
    is the most that this model's memory allows, None where it sets no bound; `working_set_bytes`
    what it was estimated to take with its keys, values and states, 0 without an estimate.
    `face` shows the model with its engine. `free` gives the memory back to the system; it is
    called once, when no engine runs and no stream is left, and blocks.
    """

    model_id: str
    size_bytes: int
    make_engine: Callable[[int], Engine]
    face: Callable[[Engine], LoadedModel]
    free: Callable[[], None]
    max_batch_size: int | None = None
    working_set_bytes: int = 0
    is_embedder: bool = False

    @property
    def footprint_bytes(self) -> int:
        return max(self.size_bytes, self.working_set_bytes)

    def batch_size(self, wanted: int) -> int:
        return wanted if self.max_batch_size is None else min(wanted, self.max_batch_size)


class ModelSource(Protocol):
    """Where models come from. All calls block and are made on threads, never on the loop."""

    @property
    def max_batch_size(self) -> int:
        """Requests that one model's engine runs at the same time."""
        ...

    def find(self, name: str, *, allow_paths: bool) -> Listing:
        """Resolve an id or alias, or a path of this machine where those are allowed. Raises
        `ModelNotFound` or `AmbiguousModel`."""
        ...

    def catalog(self) -> Sequence[Listing]:
        """Every model that could be loaded, resident or not."""
        ...

    def memory_bytes(self) -> int:
        """Physical memory of the place where weights go."""
        ...

    def read(self, listing: Listing) -> PromptModel:
        """Open, without any weights. Raises what is wrong with the bundle."""
        ...

    def footprint(self, listing: Listing) -> int:
        """Bytes that the model will take once it runs, at least those of its weights as they
        are stored. Never raises: what is wrong with a bundle is for `load` to say."""
        ...

    def load(self, listing: Listing) -> ModelContainer:
        """Open and build; takes seconds. Raises what is wrong with the bundle."""
        ...
