"""What each model was asked to run last and how that went: settings, counts and times, no text.

    asked, not loaded -> pending_preload -> handed to the engine -> submitted -> `last_request`

One event loop owns it. Bounded: the models that were asked least recently are forgotten.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from osaurus.types.events import (
    Chunk,
    Info,
    Reasoning,
    RuntimeEvent,
    ToolCallProgress,
    ToolInvocation,
)
from osaurus.types.sampling import SamplingParams

MAX_MODELS = 64

Stage = Literal["pending_preload", "submitted"]
DecodePath = Literal["plain", "constrained"]

#: Fields that hold a client's text, or any number of entries: only their sizes are kept.
_COUNTED = ("stop", "stop_token_ids", "logit_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """What a prompt holds beside text; with a model that reads text only, nothing."""

    images: int = 0
    audio: int = 0
    video: int = 0
    salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds; None for what was never reached. `prepare_s` is all that making the prompt took,
    `template_s` the rendering in it; queue, restore, prefill and decode follow one another.
    `first_token_s` is from the request to its first output, a load it waited for included."""

    template_s: float
    prepare_s: float
    queue_s: float | None = None
    restore_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRequest:
    """`stop_reason` is the engine's, `error` for a failure, `cancelled` where nobody read on;
    several, joined by commas, where choices ended differently."""

    activity_id: str
    prompt_tokens: int
    cached_prompt_tokens: int
    decode_path: DecodePath
    stop_reason: str
    timing: Timing
    media: Media = field(default_factory=Media)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as it went to the engine; `asked_s` is the monotonic clock's."""

    request_id: str
    prompt_tokens: int
    num_choices: int
    decode_path: DecodePath
    asked_s: float
    template_s: float
    prepare_s: float


@dataclass(slots=True)
class ModelRecord:
    """`bundle_defaults` are None until the model was loaded once; `effective` has every sampling
    field, of the lists among them the length."""

    stage: Stage
    effective: Mapping[str, Any]
    bundle_defaults: Mapping[str, float] | None = None
    last_request: LastRequest | None = None


class GenerationRecords:
    """By model id."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ModelRecord] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def get(self, model_id: str) -> ModelRecord | None:
        return self._models.get(model_id)

    def wait(self, model_id: str, params: SamplingParams) -> None:
        """A request waits for its model; the bundle's own values are not in `params` yet."""
        self._set(model_id, "pending_preload", params)

    def submit(
        self,
        model_id: str,
        params: SamplingParams,
        defaults: Mapping[str, float],
        submission: Submission,
    ) -> AnswerRecorder:
        """What watches the answer must be told of its events."""
        record = self._set(model_id, "submitted", params)
        record.bundle_defaults = dict(defaults)
        return AnswerRecorder(record, submission)

    def _set(self, model_id: str, stage: Stage, params: SamplingParams) -> ModelRecord:
        record = self._models.setdefault(model_id, ModelRecord(stage, {}))
        record.stage, record.effective = stage, _shown(params)
        self._models.move_to_end(model_id)
        while len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return record


class AnswerRecorder:
    """Implements `chat.observer.AnswerObserver`: writes `last_request` when the last choice ends,
    before its consumer hears of it."""

    def __init__(self, record: ModelRecord, submission: Submission) -> None:
        self._record = record
        self._submission = submission
        self._first_s: float | None = None
        self._infos: dict[int, Info] = {}
        self._is_written = False

    def event(self, index: int, event: RuntimeEvent) -> None:
        if isinstance(event, Chunk | Reasoning | ToolCallProgress | ToolInvocation):
            if self._first_s is None:
                self._first_s = time.monotonic()
        elif isinstance(event, Info):
            self._infos[index] = event
            if len(self._infos) == self._submission.num_choices:
                self._write()

    def closed(self) -> None:
        if not self._is_written:
            self._write()

    def _write(self) -> None:
        self._is_written = True
        asked = self._submission
        infos = [info for _, info in sorted(self._infos.items())]
        reasons = {"error" if info.error is not None else info.stop_reason for info in infos}
        if len(infos) < asked.num_choices:
            reasons.add("cancelled")
        self._record.last_request = LastRequest(
            activity_id=asked.request_id,
            prompt_tokens=asked.prompt_tokens,
            cached_prompt_tokens=min((info.cached_prompt_tokens for info in infos), default=0),
            decode_path=asked.decode_path,
            stop_reason=",".join(sorted(reasons)),
            timing=self._timing(infos),
        )

    def _timing(self, infos: list[Info]) -> Timing:
        asked = self._submission
        timing = Timing(template_s=asked.template_s, prepare_s=asked.prepare_s)
        if self._first_s is not None:
            timing = replace(timing, first_token_s=self._first_s - asked.asked_s)
        if not infos:
            return timing
        first = infos[0]  # it read the prompt for all of them
        return replace(
            timing,
            queue_s=first.queue_time_s,
            restore_s=first.restore_time_s,
            prefill_s=first.prompt_time_s - first.restore_time_s,
            decode_s=max(info.generate_time_s for info in infos),
        )


def _shown(params: SamplingParams) -> dict[str, Any]:
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    return {name: len(value) if name in _COUNTED else value for name, value in values.items()}
