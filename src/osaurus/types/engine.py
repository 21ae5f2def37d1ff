"""The contract between a runtime and any engine: token ids in, events out.

`BatchEngine` implements it; nothing above `runtime/` knows which engine is below.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from osaurus.errors import OsaurusError
from osaurus.types.cache import CacheConfig, CacheHints, CacheStats
from osaurus.types.events import Event, TokenLogprob
from osaurus.types.sampling import SamplingParams


class OutputPipeline(Protocol):
    """Turns one request's token ids into events. Runs on the engine's thread, holds no
    model state, one instance a choice.

    Calls: `push` for each sampled token except the end token, in order; then `finish`
    once. After `halted` is true nothing more is pushed and `finish` emits nothing.
    """

    halted: bool  #: a stop string matched; the engine ends the request in this step
    stop_string: str | None
    unclosed_reasoning: bool  #: valid after `finish`
    reasoning_tokens: int

    @property
    def tool_call_protocol_failure(self) -> bool:
        """A call's envelope opened and could not be parsed."""
        ...

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class TokenRule(Protocol):
    """What one choice may say next, by token. Runs on the engine's thread, after penalties
    and bias, so that nothing undoes it; one instance a choice."""

    def observe(self, token_id: int) -> None:
        """A token became part of the answer."""
        ...

    @property
    def forced(self) -> int | None:
        """The one token that may come next, or None."""
        ...

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not come next."""
        ...


class Constraint(Protocol):
    """A grammar that one choice has to keep to. Runs on the engine's thread; one instance a
    choice. Its mask has the last word: what it forbids no bias, ban or budget brings back.

    Masks are int32 arrays with a bit a token, the lowest first; a token past the last word is
    forbidden. `end_token_ids` end an answer, and a mask holds them where the grammar accepts.
    """

    end_token_ids: frozenset[int]

    @property
    def is_finished(self) -> bool:
        """The answer is whole and nothing can follow."""
        ...

    @property
    def is_accepting(self) -> bool:
        """The answer so far is whole."""
        ...

    def masks(self, drafts: Sequence[int]) -> Any:
        """[k + 1, V / 32] for k drafts: what may come next, and behind each draft. All zeros
        behind a draft that is forbidden. Leaves the state as it was."""
        ...

    def commit(self, token_id: int) -> None:
        """A token became part of the answer."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` committed tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What an engine needs to serve one prompt.

    `token_ids` is the whole prompt (non-empty). `make_output` builds one pipeline a choice.
    Choice `i` of `n` samples with `seed + i`. `stop_token_ids` are the bundle's end tokens;
    those of `params` are added. `make_rule`, called once a choice in order, may restrict
    its tokens. `make_constraint`, called likewise, gives the grammar of a choice: the answer
    ends where nothing can follow, and ending tokens count only where the grammar accepts.
    """

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams
    make_output: Callable[[], OutputPipeline]
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    make_rule: Callable[[], TokenRule | None] | None = None
    make_constraint: Callable[[], Constraint | None] | None = None
    cache: CacheHints = field(default_factory=CacheHints)


class EventStream(Protocol):
    """One choice's events. Iterate it from one consumer, with `for` or `async for`.

    Closing it, or dropping it before `Info`, cancels the request.
    """

    request_id: str

    def __iter__(self) -> Iterator[Event]: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def close(self) -> None: ...

    async def drained(self) -> None:
        """Return when the engine has stopped touching this request's tensors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySnapshot:
    """One consistent observation of an engine; not a reservation."""

    configured_maximum: int
    active_count: int
    pending_count: int
    active_count_high_watermark: int
    is_accepting_requests: bool
    is_shutdown: bool
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    tokens_per_second: float | None = None  #: of all requests together, over the last moments
    failure: str | None = None  #: why the engine stopped by itself

    @property
    def nominal_available_count(self) -> int:
        if self.is_shutdown:
            return 0
        return max(0, self.configured_maximum - self.active_count)


class DeviceSeat(Protocol):
    """One engine's way to a device that others use too."""

    def hold(self, meanwhile: Callable[[], bool]) -> AbstractContextManager[bool]:
        """Wait for the device and hold it while the block runs. `meanwhile` is called after
        each `nudge` during the wait; when it returns False the block runs without the device.
        Gives whether the device is held."""
        ...

    def nudge(self) -> None:
        """There is something to look after that cannot wait for the device."""
        ...


class Engine(Protocol):
    """One loaded model serving many requests."""

    max_context_tokens: int

    def refusal(self, prompt_tokens: int) -> OsaurusError | None:
        """Why a prompt of that length can never be answered here: the model's context, or the
        memory for its keys and values. None when it can, now or when others have ended."""
        ...

    def generate(self, request: GenerationRequest) -> list[EventStream]:
        """Queue a prompt; return `request.n` streams at once. Never raises for a full or
        shut-down engine: such a stream holds a single `Info(stop_reason="cancelled")`."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Cancel every choice of a request. False when it is unknown or already finished."""
        ...

    def update_max_batch_size(self, n: int) -> None:
        """Raises `InvalidMaxBatchSize` or `EngineShutdown`."""
        ...

    def capacity_snapshot(self) -> CapacitySnapshot: ...

    def cache_stats(self) -> CacheStats:
        """Counters of the model's cache; safe from any thread."""
        ...

    def clear_cache(self) -> None:
        """Forget every reusable prefix of this model, in memory and on disk. Requests that
        run keep what they hold."""
        ...

    def shutdown(self) -> None:
        """Fail closed: stop, end every stream, return when nothing touches the device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, resolved by the runtime.

    `kv_budget_bytes` is the pool's size; None takes a quarter of the memory available to
    this process. `kv_max_blocks` bounds it to so many blocks of every layer. An accelerator's
    allocator may hold `allocator_cache_bytes` unused, None for any.
    `prefill_chunk_tokens` bounds one prefill forward; with streams running a chunk is sized to
    `latency_budget_ms`. At most `decode_batch_size` requests decode in one forward, and
    `prefill_batch_size` prompts take turns being read, None for all. An engine that was idle for
    `light_sleep_s` gives up the prefixes that it holds in memory. At most `threads` compute on
    the CPU, None for what `kernels.cpu_topology` chooses.
    """

    max_batch_size: int = 8
    kv_budget_bytes: int | None = None
    kv_max_blocks: int | None = None
    kv_block_tokens: int = 32
    allocator_cache_bytes: int | None = 512 << 20
    prefill_chunk_tokens: int = 512
    latency_budget_ms: float = 75.0
    decode_batch_size: int | None = None
    prefill_batch_size: int | None = None
    light_sleep_s: float | None = None
    threads: int | None = None
    max_context_tokens: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
