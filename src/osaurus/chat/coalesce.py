"""Several small pieces of an answer's text as one, for consumers that want fewer of them.

The first piece goes out at once, so that nobody waits for a beginning; whatever is not text
lets the pieces before it go first. One instance a choice.
"""

from __future__ import annotations

from osaurus.types.events import Chunk, RuntimeEvent


class Coalescer:
    def __init__(self, interval: int) -> None:
        """`interval` pieces become one; 1 changes nothing."""
        self._interval = interval
        self._held: list[Chunk] = []
        self._has_begun = False

    def take(self, event: RuntimeEvent) -> list[RuntimeEvent]:
        """What to pass on now, in order."""
        if not isinstance(event, Chunk):
            return [*self._flush(), event]
        if not self._has_begun:
            self._has_begun = True
            return [event]
        self._held.append(event)
        return self._flush() if len(self._held) >= self._interval else []

    def _flush(self) -> list[RuntimeEvent]:
        held, self._held = self._held, []
        if len(held) < 2:
            return [*held]
        text = "".join(chunk.text for chunk in held)
        return [Chunk(text, tuple(one for chunk in held for one in chunk.logprobs))]
