"""An output pipeline that shows its text to a detector, on the engine's thread: what is found
does not depend on when a consumer reads."""

from __future__ import annotations

from typing import Any

from osaurus.parsing.output import OutputPipeline
from osaurus.runtime.degeneration import DegenerationDetector
from osaurus.types.events import Chunk, Event, Reasoning, TokenLogprob


class WatchedOutput(OutputPipeline):
    __slots__ = ("_detector",)

    def __init__(self, detector: DegenerationDetector, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._detector = detector

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> list[Event]:
        return self._shown(super().push(token_id, logprob))

    def finish(self) -> list[Event]:
        return self._shown(super().finish())

    def _shown(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Chunk | Reasoning):
                self._detector.observe(event.text)
        return events


def output_of(detector: DegenerationDetector | None, *args: Any, **options: Any) -> OutputPipeline:
    """A pipeline of those arguments, watched where there is a detector."""
    if detector is None:
        return OutputPipeline(*args, **options)
    return WatchedOutput(detector, *args, **options)
