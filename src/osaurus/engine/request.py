"""One choice of one request: its tokens, its memory, its phase and its clock.

    WAITING --admit--> PREFILL --prompt[:-1] fed--> DECODE --finish--> FINISHED
       ^                  |  ^                        |
       |               RESTORING (reads a prefix from disk), FORKING (waits for a
       |               sibling's prefill)             |
       +------------ preempt (memory released) -------+

Tokens before `num_computed` have their KV in blocks and are folded into the state. Prompt
tokens but the last are fed in prefill chunks; everything from the last prompt token on is fed
as decode rows, after a preemption too, so that a token's KV always comes from the same
arithmetic.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.cache.sequence import CachedSequence
from osaurus.cache.states import StatePool
from osaurus.engine.client import Mailbox
from osaurus.engine.sampler import TokenSampler
from osaurus.errors import OsaurusError
from osaurus.types.engine import GenerationRequest, OutputPipeline
from osaurus.types.events import Info, StopReason

#: A request that computes nothing holds no state.
NO_SLOT = -1


class Phase(Enum):
    WAITING = "waiting"
    RESTORING = "restoring"
    FORKING = "forking"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Mutable; owned by the engine's thread."""

    request_id: str
    index: int
    prompt: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    sampler: TokenSampler
    output: OutputPipeline
    mailbox: Mailbox
    tables: list[BlockTable]
    cached: CachedSequence
    submitted_at: float
    fork_source: Request | None = None
    is_replay: bool = False  #: prefill for the cache's sake; nobody listens
    state_slot: int = NO_SLOT  #: held exactly while active
    codes_kv: bool = True  #: the middle of its keys and values may be compressed
    coded_until: int = 0  #: blocks before this index are coded, or exact for good
    alone_until: int = 0  #: decode rows up to here run in no company: one failed
    phase: Phase = Phase.WAITING
    generated: list[int] = field(default_factory=list)
    num_computed: int = 0
    cancelled: bool = False
    admitted_at: float | None = None
    restored_at: float | None = None  #: the cache has given what it holds of the prompt
    first_token_at: float | None = None
    last_progress_at: float = 0.0
    reported_tokens: int = 0  #: prefill progress told so far
    was_looked_up: bool = False
    poisoned: bool = False  #: its KV may hold values that are not finite

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def num_prefill(self) -> int:
        """Tokens that prefill chunks feed: all of the prompt but its last token."""
        return len(self.prompt) - 1

    def is_end(self, token_id: int) -> bool:
        """Whether a sampled token ends the answer. With a grammar an end token always does: it
        was allowed because nothing else was."""
        constraint = self.sampler.constraint
        return token_id in self.stop_token_ids or (
            constraint is not None and token_id in constraint.end_token_ids
        )

    @property
    def is_complete(self) -> bool:
        """The answer's grammar is satisfied and nothing can follow."""
        constraint = self.sampler.constraint
        return constraint is not None and constraint.is_finished

    @property
    def is_active(self) -> bool:
        return self.phase not in (Phase.WAITING, Phase.FINISHED)

    def token_at(self, position: int) -> int:
        offset = position - len(self.prompt)
        return self.prompt[position] if offset < 0 else self.generated[offset]

    def tokens_between(self, first: int, last: int) -> list[int]:
        """Tokens [first, last) of prompt and answer."""
        if last <= len(self.prompt):
            return self.prompt[first:last]
        return [self.token_at(position) for position in range(first, last)]

    def settle_phase(self) -> None:
        """PREFILL or DECODE, by what has been fed."""
        done = self.num_computed >= self.num_prefill
        self.phase = Phase.DECODE if done else Phase.PREFILL

    @property
    def is_alone(self) -> bool:
        return self.num_computed < self.alone_until

    def release_memory(self, pool: BlockPool, slots: StatePool) -> None:
        if self.state_slot != NO_SLOT:
            slots.release(self.state_slot)
            self.state_slot = NO_SLOT
        for table in self.tables:
            table.release(pool, clear=self.poisoned)
        self.num_computed = self.coded_until = 0
        self.poisoned = False

    def info(
        self, now: float, reason: StopReason, error: str | None = None, code: str | None = None
    ) -> Info:
        """The closing event; call after `output.finish()`."""
        admitted, first = self.admitted_at, self.first_token_at
        prompt_until = first if first is not None else now
        return Info(
            prompt_tokens=self.num_prompt,
            generated_tokens=len(self.generated),
            cached_prompt_tokens=self.cached.matched_tokens,
            cache_detail=self.cached.detail,
            reasoning_tokens=self.output.reasoning_tokens,
            queue_time_s=(admitted if admitted is not None else now) - self.submitted_at,
            prompt_time_s=0.0 if admitted is None else prompt_until - admitted,
            restore_time_s=(
                0.0 if admitted is None or self.restored_at is None else self.restored_at - admitted
            ),
            generate_time_s=0.0 if first is None else now - first,
            stop_reason=reason,
            stop_string=self.output.stop_string,
            unclosed_reasoning=self.output.unclosed_reasoning,
            tool_call_protocol_failure=self.output.tool_call_protocol_failure,
            error=error,
            error_code=code,
        )


def refused(prompt: Sequence[int], error: OsaurusError) -> Info:
    """The whole answer to a prompt that can never be served."""
    return Info(
        prompt_tokens=len(prompt),
        stop_reason="cancelled",
        error=error.message,
        error_code=error.code,
    )


def choices_of(
    request: GenerationRequest,
    prompt: list[int],
    boxes: Sequence[Mailbox],
    *,
    room: int,
    vocab_size: int,
    num_groups: int,
    open_cached: Callable[[CachedSequence | None], CachedSequence],
    now: float,
) -> list[Request]:
    """A `Request` for each mailbox; all but the first may fork from the first's prefill.
    `room` bounds the answer in tokens."""
    params = request.params
    ends = frozenset() if params.ignore_eos else request.stop_token_ids
    stop_ids = ends | frozenset(params.stop_token_ids)
    seed = params.seed if params.seed is not None else secrets.randbits(62)
    choices: list[Request] = []
    for index, box in enumerate(boxes):
        choices.append(
            Request(
                request_id=request.request_id,
                index=index,
                prompt=prompt,
                max_new_tokens=min(params.max_tokens or room, room),
                stop_token_ids=stop_ids,
                sampler=TokenSampler(
                    params,
                    seed + index,
                    prompt,
                    vocab_size,
                    stop_ids,
                    request.make_rule() if request.make_rule else None,
                    request.make_constraint() if request.make_constraint else None,
                ),
                output=request.make_output(),
                mailbox=box,
                tables=[BlockTable(group) for group in range(num_groups)],
                cached=open_cached(choices[0].cached if choices else None),
                codes_kv=request.cache.kv_mode is None or request.cache.kv_mode.kind != "none",
                submitted_at=now,
                fork_source=choices[0] if choices else None,
            )
        )
    return choices
