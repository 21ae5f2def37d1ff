"""Who wants to know what happens to the answers: figures, not text.

The server's metrics implement it; nothing here knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from osaurus.types.events import RuntimeEvent


class AnswerObserver(Protocol):
    """One request's answer, from the moment it was asked for."""

    def event(self, index: int, event: RuntimeEvent) -> None:
        """Choice `index` said something; its `Info` is the last."""
        ...

    def closed(self) -> None:
        """Nobody reads on; choices without an `Info` were given up."""
        ...


#: Called with the model's id, once it is loaded, and when it was asked (monotonic seconds).
Observe = Callable[[str, float], AnswerObserver]
