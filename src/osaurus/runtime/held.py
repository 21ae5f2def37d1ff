"""What a caller of `ModelRuntime.acquire` gets, and what it is before it gets it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from osaurus.runtime.model import LoadedModel, ModelContainer
from osaurus.types.runtime import ModelUse


class HeldModel:
    """A resident model with a lease on it. Release it when the stream has drained."""

    def __init__(self, model: LoadedModel, release: Callable[[], object]) -> None:
        self.model = model
        self._release: Callable[[], object] | None = release

    def release(self) -> None:
        """Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> LoadedModel:
        return self.model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Waiter:
    """A caller on its way to a model. The moment in which the model is there gives it the
    container and a lease on it, so that nothing can evict the model before the caller has come
    back to it."""

    def __init__(self, use: ModelUse) -> None:
        self.use = use
        self.container: ModelContainer | None = None
