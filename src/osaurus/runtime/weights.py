"""One model's weights in memory: engines are built on them, one at a time, and at the end they
go back to the system."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from osaurus.errors import EngineShutdown
from osaurus.runtime.gate import DeviceGate
from osaurus.types.engine import Engine, EngineConfig

if TYPE_CHECKING:
    from osaurus.models.base import Model

logger = logging.getLogger(__name__)


class LoadedWeights:
    """All calls block and are made on threads. Imports torch when called, not before."""

    def __init__(
        self,
        model: Model,
        *,
        name: str,
        identity: str,
        token_bytes: Callable[[int], bytes],
        config: EngineConfig,
        gate: DeviceGate,
    ) -> None:
        self._model: Model | None = model
        self._name = name
        self._identity = identity
        self._token_bytes = token_bytes
        self._config = config
        self._gate = gate

    def make_engine(self, max_batch_size: int) -> Engine:
        """Raises `InsufficientResources` when the KV budget holds no request, and
        `EngineShutdown` once the weights were freed."""
        from osaurus.engine.core import BatchEngine

        if self._model is None:
            raise EngineShutdown(f"{self._name} was unloaded")
        return BatchEngine(
            self._model,
            config=replace(self._config, max_batch_size=max_batch_size),
            token_bytes=self._token_bytes,
            seat=self._gate.seat(f"gen:{self._name}"),
            name=self._name,
            identity=self._identity,
        )

    def free(self) -> None:
        """Let the weights go. No engine may run on them."""
        give_back(self._gate, self._name, self._let_go)

    def _let_go(self) -> None:
        self._model = None


def give_back(gate: DeviceGate, name: str, let_go: Callable[[], object]) -> None:
    """Drop what holds a model's weights, then hand their memory to the system."""
    import torch

    from osaurus.kernels.heap import trim_heap

    with gate.hold(f"unload:{name}"):
        let_go()
        gc.collect()  # engines and their models refer to each other
        if torch.cuda.is_initialized():
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:  # a lost device gives nothing back
                logger.warning("%s: its device's memory stays taken: %s", name, error)
        trim_heap()
