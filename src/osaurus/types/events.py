"""What a running request tells its consumer, from the engine up to the wire.

Order in one stream: `PrefillProgress*`, then `Chunk`, `Reasoning`, `ToolCallProgress` and
`ToolCall` interleaved, then exactly one `Info`, which is last on every path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

StopReason = Literal["stop", "length", "cancelled"]
PrefillStage = Literal["queued", "cache_lookup", "cache_restore", "prefill", "complete"]
CacheDetail = Literal["paged", "disk", "miss", "disabled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token's natural-log probability under the unfiltered distribution.

    `data` is the token's bytes; `text` is those bytes decoded with U+FFFD for what is not
    whole UTF-8. `top` holds the alternatives, most likely first, without their own `top`.
    """

    token_id: int
    text: str
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """Units are prompt tokens. `total == 0` means indeterminate."""

    stage: PrefillStage
    completed: int
    total: int
    detail: str = ""

    @property
    def fraction(self) -> float:
        return 0.0 if self.total <= 0 else min(1.0, max(0.0, self.completed / self.total))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Visible text, never empty unless it only carries `logprobs`."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A delta of thinking text, without its markers."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallProgress:
    """Raw growth of a tool call that is still open: a preview, never actionable."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One complete call. `arguments` is the parsed object, typed from the tool's schema."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """The last event of a request, sent exactly once on every path.

    Times are seconds: `prompt_time_s` from slot admission to the first sampled token,
    `generate_time_s` from there to the finish, `queue_time_s` from submission to admission.
    `restore_time_s` is the part of `prompt_time_s` until a cache had given what it held.
    `generated_tokens` counts sampled tokens, those of a matched stop string included, the
    end token excluded.
    """

    prompt_tokens: int
    generated_tokens: int = 0
    cached_prompt_tokens: int = 0
    cache_detail: CacheDetail = "disabled"
    reasoning_tokens: int = 0
    queue_time_s: float = 0.0
    prompt_time_s: float = 0.0
    restore_time_s: float = 0.0
    generate_time_s: float = 0.0
    stop_reason: StopReason = "stop"
    stop_string: str | None = None
    unclosed_reasoning: bool = False
    tool_call_protocol_failure: bool = False
    error: str | None = None
    error_code: str | None = None

    @property
    def prompt_tokens_per_second(self) -> float:
        fed = self.prompt_tokens - self.cached_prompt_tokens
        return fed / self.prompt_time_s if self.prompt_time_s > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.generate_time_s if self.generate_time_s > 0 else 0.0


Event = PrefillProgress | Chunk | Reasoning | ToolCallProgress | ToolCall | Info


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolInvocation:
    """A `ToolCall` as it leaves the runtime: `arguments_json` is canonical JSON text."""

    name: str
    arguments_json: str
    call_id: str | None = None


#: What a consumer above the runtime sees; the same order as engine events.
RuntimeEvent = PrefillProgress | Chunk | Reasoning | ToolCallProgress | ToolInvocation | Info
