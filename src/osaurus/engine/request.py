"""One choice of one request: its tokens, its blocks, its phase and its clock.

    WAITING --admit--> PREFILL --prompt[:-1] fed--> DECODE --finish--> FINISHED
       ^                  |  ^                        |
       |               FORKING (waits for a sibling's prefill)
       +------------ preempt (blocks released) -------+

Tokens before `num_computed` have their KV in blocks. Prompt tokens but the last are fed in
prefill chunks; everything from the last prompt token on is fed as decode rows, after a
preemption too, so that a token's KV always comes from the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.engine.client import Mailbox
from osaurus.engine.sampler import TokenSampler
from osaurus.types.engine import OutputPipeline
from osaurus.types.events import Info, StopReason


class Phase(Enum):
    WAITING = "waiting"
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
    submitted_at: float
    fork_source: Request | None = None
    phase: Phase = Phase.WAITING
    generated: list[int] = field(default_factory=list)
    num_computed: int = 0
    cancelled: bool = False
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_progress_at: float = 0.0
    reported_tokens: int = 0  #: prefill progress told so far
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

    @property
    def is_active(self) -> bool:
        return self.phase in (Phase.FORKING, Phase.PREFILL, Phase.DECODE)

    def token_at(self, position: int) -> int:
        offset = position - len(self.prompt)
        return self.prompt[position] if offset < 0 else self.generated[offset]

    def settle_phase(self) -> None:
        """PREFILL or DECODE, by what has been fed."""
        done = self.num_computed >= self.num_prefill
        self.phase = Phase.DECODE if done else Phase.PREFILL

    def release_blocks(self, pool: BlockPool) -> None:
        for table in self.tables:
            table.release(pool, clear=self.poisoned)
        self.num_computed = 0
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
            reasoning_tokens=self.output.reasoning_tokens,
            queue_time_s=(admitted if admitted is not None else now) - self.submitted_at,
            prompt_time_s=0.0 if admitted is None else prompt_until - admitted,
            generate_time_s=0.0 if first is None else now - first,
            stop_reason=reason,
            stop_string=self.output.stop_string,
            unclosed_reasoning=self.output.unclosed_reasoning,
            tool_call_protocol_failure=self.output.tool_call_protocol_failure,
            error=error,
            error_code=code,
        )
