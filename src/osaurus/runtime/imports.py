"""What every load imports: torch and all that stands on it."""

from __future__ import annotations

import gc
from functools import cache


@cache
def import_engine() -> None:
    """Once a process, on whichever thread loads first.

    A million objects come and none of them goes: the collector would walk them again and
    again, while they are imported and in every full collection ever after, so it rests during
    the imports and leaves what they made alone.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import osaurus.engine.core
        import osaurus.models.registry  # noqa: F401
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()
