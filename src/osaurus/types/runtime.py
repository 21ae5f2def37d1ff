"""How the runtime keeps models: the settings of `runtime/`, resolved by whoever starts it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EvictionPolicy = Literal["strict_single_model", "manual_multi_model"]
ResidencyMode = Literal["immediately", "after_seconds", "never"]
#: Who used a model last; decides whose leaving may shorten its stay.
UseSource = Literal["chat_ui", "http_api", "plugin", "cli", "proof"]
#: A background load never disturbs a model that others use.
LoadIntent = Literal["interactive", "background"]

DEFAULT_IDLE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPolicy:
    """When a model that nobody uses is unloaded. `seconds` counts for `after_seconds`."""

    mode: ResidencyMode = "after_seconds"
    seconds: float = DEFAULT_IDLE_S

    @property
    def delay_s(self) -> float | None:
        """Seconds from the last release to the unload; None is never."""
        match self.mode:
            case "immediately":
                return 0.0
            case "never":
                return None
            case "after_seconds":
                return self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """`ModelRuntime.apply` makes a changed value live.

    `max_concurrent_sequences` is the resolved capacity of one engine; None leaves it to the
    model source. `ram_soft_threshold` is the share of physical memory beyond which
    `manual_multi_model` evicts. `eviction_wait_s` bounds how long an eviction waits for streams
    before it ends them. `failure_pause_s` is how long a failed load is refused at once.
    `background_wait_s` bounds a background load's wait for live chats to end.

    Without `loads_on_request` only models load that were asked for by hand; without
    `wakes_on_request` one that was unloaded for idleness loads by hand only. `request_timeout_s`
    bounds an answer from its request on, and `stream_interval` pieces of text go out as one.
    """

    eviction: EvictionPolicy = "strict_single_model"
    residency: ResidencyPolicy = field(default_factory=ResidencyPolicy)
    max_concurrent_sequences: int | None = None
    ram_soft_threshold: float = 0.80
    degeneration_detection: bool = False
    eviction_wait_s: float = 300.0
    failure_pause_s: float = 30.0
    background_wait_s: float = 30.0
    loads_on_request: bool = True
    wakes_on_request: bool = True
    request_timeout_s: float | None = None
    stream_interval: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """Who uses a model and what for. `preserves_owner`: an errand of the program's own, which
    leaves the model to whoever used it before. `by_hand`: somebody asked for the model to be
    loaded, whatever the settings let requests load."""

    source: UseSource = "http_api"
    intent: LoadIntent = "interactive"
    preserves_owner: bool = False
    by_hand: bool = False
