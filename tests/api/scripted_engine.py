"""An engine that says what a test tells it, and a source that serves it as a model.

It keeps the engine's whole contract (own thread, mailbox, output pipeline, cancellation between
steps, one `Info` last) so that everything above it runs as it does in earnest. Tokens are bytes:
a text of n UTF-8 bytes is n tokens, which makes every count in a test plain.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from osaurus.bundle.template import ChatTemplate
from osaurus.engine.client import Mailbox, Stream
from osaurus.errors import EngineShutdown, ModelNotFound, OsaurusError
from osaurus.runtime.conventions import Conventions
from osaurus.runtime.model import (
    Listing,
    LoadedModel,
    ModelContainer,
    PromptModel,
    UnloadedModel,
)
from osaurus.types.cache import CacheStats
from osaurus.types.engine import CapacitySnapshot, EventStream, GenerationRequest
from osaurus.types.events import Event, Info, PrefillProgress, StopReason, TokenLogprob

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteTokenizer:
    """Ids 0 to 255 are bytes; added tokens follow, the `special` ones being control tokens."""

    def __init__(
        self,
        special: Sequence[str] = ("<|im_start|>", "<|im_end|>", "<bos>"),
        others: Sequence[str] = (),
        *,
        add_bos_to_chat: bool = False,
    ) -> None:
        texts = (*special, *others)
        self.added_tokens: dict[str, int] = {text: 256 + i for i, text in enumerate(texts)}
        self.special_ids = frozenset(self.added_tokens[text] for text in special)
        self.bos_token_id = self.added_tokens.get("<bos>")
        self.add_bos = self.add_bos_to_chat = add_bos_to_chat
        self.special_tokens: Mapping[str, str] = {}
        self.frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._texts = {token_id: text for text, token_id in self.added_tokens.items()}
        self.vocab_size = 256 + len(texts)
        self._split = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))

    def encode(self, text: str, *, parse_special: bool, add_bos: bool) -> list[int]:
        ids: list[int] = []
        if add_bos and self.bos_token_id is not None:
            ids.append(self.bos_token_id)
        position = 0
        for match in self._split.finditer(text) if parse_special else ():
            ids += text[position : match.start()].encode()
            ids.append(self.added_tokens[match[0]])
            position = match.end()
        return ids + list(text[position:].encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self._texts[token_id].encode()

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


@dataclass(frozen=True)
class Say:
    """Sample the tokens of this text, one a step."""

    text: str


@dataclass(frozen=True)
class Emit:
    """Put this event into the stream as it is."""

    event: Event


@dataclass(frozen=True)
class Hold:
    """Wait until the test opens this gate, or until the request is cancelled."""

    gate: str


@dataclass(frozen=True)
class Fail:
    """End with an error, as an engine does when a request goes wrong."""

    message: str
    code: str = "request_failed"


Step = Say | Emit | Hold | Fail
Script = Callable[[GenerationRequest, int], Sequence[Step]]


def say_hello(request: GenerationRequest, index: int) -> Sequence[Step]:
    return [Say("Hello!")]


class ScriptedEngine:
    """Runs `script(request, choice)` for every choice on a thread of its own."""

    def __init__(self, script: Script = say_hello, *, max_context_tokens: int = 4096) -> None:
        self.script = script
        self.max_batch_size = 8
        self.failure: str | None = None
        self.max_context_tokens = max_context_tokens
        self.requests: list[GenerationRequest] = []
        self.stats = CacheStats()  #: what a test says the cache did
        self.num_cleared = 0
        self._changed = threading.Condition()
        self._gates: set[str] = set()
        self._waiting_at: list[str] = []
        self._cancelled: set[tuple[str, int]] = set()
        self._running = 0
        self._is_shut_down = False

    def refusal(self, prompt_tokens: int) -> OsaurusError | None:
        return None  # its context is the only bound

    def generate(self, request: GenerationRequest) -> list[EventStream]:
        self.requests.append(request)
        streams: list[EventStream] = []
        for index in range(request.n):
            mailbox = Mailbox()
            streams.append(Stream(request.request_id, mailbox, self._canceller(request, index)))
            with self._changed:
                self._running += 1
            arguments = (request, index, mailbox)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()
        return streams

    def cancel(self, request_id: str) -> bool:
        known = [r for r in self.requests if r.request_id == request_id]
        for request in known:
            for index in range(request.n):
                self._canceller(request, index)()
        return bool(known)

    def update_max_batch_size(self, n: int) -> None:
        with self._changed:
            if self._is_shut_down:
                raise EngineShutdown("the engine has shut down")
            self.max_batch_size = n

    def capacity_snapshot(self) -> CapacitySnapshot:
        with self._changed:
            return CapacitySnapshot(
                configured_maximum=self.max_batch_size,
                active_count=self._running,
                pending_count=0,
                active_count_high_watermark=self._running,
                is_accepting_requests=not self._is_shut_down,
                is_shutdown=self._is_shut_down,
                failure=self.failure,
            )

    def cache_stats(self) -> CacheStats:
        return self.stats

    def clear_cache(self) -> None:
        self.num_cleared += 1

    def shutdown(self) -> None:
        with self._changed:
            self._is_shut_down = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running == 0)

    # What a test may do.

    def fail(self, reason: str) -> None:
        """Stop by itself, as an engine does whose device is gone."""
        self.failure = reason
        self.shutdown()

    def open_gate(self, name: str) -> None:
        with self._changed:
            self._gates.add(name)
            self._changed.notify_all()

    def wait_until_held(self, gate: str, count: int = 1) -> None:
        """Return once `count` choices stand at `gate`."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting_at.count(gate) >= count, 10)

    def wait_until_idle(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._running == 0, 10)

    # The engine's side.

    def _canceller(self, request: GenerationRequest, index: int) -> Callable[[], None]:
        def cancel() -> None:
            with self._changed:
                self._cancelled.add((request.request_id, index))
                self._changed.notify_all()

        return cancel

    def _is_cancelled(self, request: GenerationRequest, index: int) -> bool:
        return self._is_shut_down or (request.request_id, index) in self._cancelled

    def _run(self, request: GenerationRequest, index: int, mailbox: Mailbox) -> None:
        try:
            choice = _Choice(request, index, mailbox)
            for step in self._steps(choice):
                if not choice.take(step):
                    break
            if choice.info is None:
                choice.end("stop")
        finally:
            mailbox.mark_drained()
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _steps(self, choice: _Choice) -> Iterator[Step]:
        for step in self.script(choice.request, choice.index):
            if isinstance(step, Hold):
                self._hold(step.gate, choice)
            if self._is_cancelled(choice.request, choice.index):
                choice.end("cancelled")
                return
            if isinstance(step, Say):
                yield from self._characters(step.text, choice)
            elif not isinstance(step, Hold):
                yield step

    def _characters(self, text: str, choice: _Choice) -> Iterator[Step]:
        for char in text:
            if self._is_cancelled(choice.request, choice.index):
                choice.end("cancelled")
                return
            yield Say(char)

    def _hold(self, gate: str, choice: _Choice) -> None:
        with self._changed:
            self._waiting_at.append(gate)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: gate in self._gates or self._is_cancelled(choice.request, choice.index)
            )
            self._waiting_at.remove(gate)


class _Choice:
    """One choice's pipeline and counts."""

    def __init__(self, request: GenerationRequest, index: int, mailbox: Mailbox) -> None:
        self.request = request
        self.index = index
        self.info: Info | None = None
        self._mailbox = mailbox
        self._output = request.make_output()
        self._num_generated = 0
        total = len(request.token_ids)
        mailbox.put(PrefillProgress(stage="queued", completed=0, total=total, detail="admitted"))
        mailbox.put(PrefillProgress(stage="complete", completed=total, total=total))

    def take(self, step: Step) -> bool:
        """False once the choice has ended."""
        match step:
            case Emit(event):
                self._mailbox.put(event)
            case Say(text):
                for byte in text.encode():
                    if not self._sample(byte):
                        return False
            case Fail(message, code):
                self.end("cancelled", error=message, error_code=code)
            case Hold():
                pass
        return self.info is None

    def _sample(self, token_id: int) -> bool:
        params = self.request.params
        self._num_generated += 1
        for event in self._output.push(token_id, self._logprob(token_id)):
            self._mailbox.put(event)
        if self._output.halted:
            self.end("stop")
        elif params.max_tokens is not None and self._num_generated >= params.max_tokens:
            self.end("length")
        return self.info is None

    def _logprob(self, token_id: int) -> TokenLogprob | None:
        params = self.request.params
        if not params.logprobs:
            return None
        top = tuple(_logprob_of(token_id + i) for i in range(params.top_logprobs))
        return TokenLogprob(
            token_id=token_id, text=_text(token_id), data=bytes([token_id]), logprob=-0.5, top=top
        )

    def end(
        self, reason: StopReason, *, error: str | None = None, error_code: str | None = None
    ) -> None:
        for event in self._output.finish() if reason != "cancelled" else ():
            self._mailbox.put(event)
        self.info = Info(
            prompt_tokens=len(self.request.token_ids),
            generated_tokens=self._num_generated,
            stop_reason=reason,
            stop_string=self._output.stop_string,
            reasoning_tokens=self._output.reasoning_tokens,
            unclosed_reasoning=self._output.unclosed_reasoning,
            tool_call_protocol_failure=self._output.tool_call_protocol_failure,
            generate_time_s=0.5,
            prompt_time_s=0.1,
            error=error,
            error_code=error_code,
        )
        self._mailbox.put(self.info)


def _text(token_id: int) -> str:
    return bytes([token_id]).decode(errors="replace")


def _logprob_of(token_id: int) -> TokenLogprob:
    return TokenLogprob(
        token_id=token_id, text=_text(token_id), data=bytes([token_id]), logprob=-0.5
    )


@dataclass(frozen=True)
class FakeListing:
    model_id: str
    path: Path = Path("/nonexistent/model")
    modified: datetime = datetime(2026, 1, 2, tzinfo=UTC)
    size_bytes: int = 0
    is_embedder: bool = False
    context: int = 4096


@dataclass
class ScriptedSource:
    """A `ModelSource` of made models. `loads` and `freed` count; `failures` are raised; `gates`
    hold a load until set. `path` is where the models pretend to live. A second engine for one
    model is made by `make_engine`."""

    engines: Mapping[str, ScriptedEngine]
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    template: str = CHATML
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    failures: dict[str, BaseException] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    path: Path = Path("/nonexistent/model")
    conventions: Mapping[str, Conventions] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    sizes: Mapping[str, int] = field(default_factory=dict)
    memory: int = 1 << 40
    make_engine: Callable[[str], ScriptedEngine] | None = None

    max_batch_size: int = 8

    def find(self, name: str, *, allow_paths: bool = False) -> Listing:
        name = self.aliases.get(name, name)
        if name not in self.engines:
            raise ModelNotFound(name, "known: " + ", ".join(self.engines))
        return FakeListing(name, self.path, size_bytes=self.sizes.get(name, 0))

    def memory_bytes(self) -> int:
        return self.memory

    def catalog(self) -> Sequence[Listing]:
        return [FakeListing(name, self.path) for name in self.engines]

    def read(self, listing: Listing) -> PromptModel:
        name = listing.model_id
        return UnloadedModel(
            model_id=name,
            tokenizer=self.tokenizer,
            template=ChatTemplate(self.template),
            conventions=self.conventions.get(name, Conventions()),
            context_tokens=self.engines[name].max_context_tokens,
        )

    def footprint(self, listing: Listing) -> int:
        return listing.size_bytes

    def load(self, listing: Listing) -> ModelContainer:
        name = listing.model_id
        self.loads.append(name)
        if name in self.gates:
            assert self.gates[name].wait(10)
        if name in self.failures:
            raise self.failures[name]
        template: Any = ChatTemplate(self.template)

        def make_engine(max_batch_size: int) -> ScriptedEngine:
            engine = self.make_engine(name) if self.make_engine else self.engines[name]
            engine.max_batch_size = max_batch_size
            return engine

        return ModelContainer(
            model_id=name,
            size_bytes=listing.size_bytes,
            make_engine=make_engine,
            face=lambda engine: LoadedModel(
                model_id=name,
                engine=engine,
                tokenizer=self.tokenizer,
                template=template,
                sampling_defaults=self.sampling_defaults,
                conventions=self.conventions.get(name, Conventions()),
            ),
            free=lambda: self.freed.append(name),
        )
