"""Plans through the model: builds the batch, runs the forward, hands back logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from osaurus.cache.blocks import BlockPool
from osaurus.engine.batch import build_batch
from osaurus.engine.scheduler import RowSpan
from osaurus.models.base import LayerKV, Model


class Runner:
    """The only caller of the model; lives on the engine's thread."""

    def __init__(self, model: Model, pool: BlockPool) -> None:
        self._model = model
        self._pool = pool
        self._kv: list[LayerKV] = []
        for layer in range(len(model.layers_topology)):
            group, storage = pool.layer_view(layer)
            self._kv.append(LayerKV(group=group, storage=storage))

    def decode(self, spans: Sequence[RowSpan]) -> Tensor | None:
        """Feed decode rows. Returns [L, V] float32 logits, one row for each span that
        reaches its request's end, in order; None when none does."""
        batch = build_batch(spans, self._pool, prefill=False, device=self._model.device)
        return self._model.forward(batch, self._kv).logits

    def prefill(self, span: RowSpan) -> None:
        """Feed one chunk; its keys and values are in the pool on return."""
        batch = build_batch([span], self._pool, prefill=True, device=self._model.device)
        self._model.forward(batch, self._kv)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # its time and progress are then true
