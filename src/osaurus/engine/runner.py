"""Plans through the model: builds the batch, runs the forward, hands back logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from osaurus.cache.blocks import BlockPool
from osaurus.cache.states import StatePool
from osaurus.engine.batch import build_batch
from osaurus.engine.scheduler import RowSpan
from osaurus.models.base import ForwardBatch, LayerMemory, Model


class Runner:
    """The only caller of the model; lives on the engine's thread."""

    def __init__(self, model: Model, pool: BlockPool, slots: StatePool | None = None) -> None:
        self._model = model
        self._pool = pool
        self._slots = slots or StatePool([], num_slots=0, max_tokens=0)
        self.memory: list[LayerMemory] = []
        self.bind()

    def bind(self) -> None:
        """Look up where each layer's memory lies; again when slots have been added."""
        self.memory = []
        for layer, topology in enumerate(self._model.layers_topology):
            group, storage, coded = -1, torch.empty(0), None
            if topology.paged is not None:
                group, storage = self._pool.layer_view(layer)
                coded = self._pool.coded_view(layer)
            state = self._slots.layer_view(layer)
            self.memory.append(LayerMemory(group=group, storage=storage, state=state, coded=coded))
        #: Whether a chunk may share a forward with decode rows: where the model reads block
        #: tables by itself all rows have one arithmetic.
        self.takes_both = not self._slots.layers and all(
            self._model.reads_block_tables(self.memory, prefill=prefill)
            for prefill in (True, False)
        )

    def release(self) -> None:
        """Let go of the model and its memory, whoever still holds the engine."""
        del self._model
        self.memory = []

    def decode(self, spans: Sequence[RowSpan]) -> Tensor | None:
        """Feed decode rows, and a chunk after them where the model takes both. Returns [L, V]
        float32 logits, one row for each span that reaches its request's end, in order; None
        when none does."""
        batch = self._batch(spans, prefill=False)
        return self._model.forward(batch, self.memory).logits

    def prefill(self, span: RowSpan) -> None:
        """Feed one chunk; its keys and values are in the pool on return."""
        self._model.forward(self._batch([span], prefill=True), self.memory)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # its time and progress are then true

    def _batch(self, spans: Sequence[RowSpan], *, prefill: bool) -> ForwardBatch:
        return build_batch(
            spans,
            self._pool,
            prefill=prefill,
            device=self._model.device,
            with_state=bool(self._slots.layers),
            with_plans=not self._model.reads_block_tables(self.memory, prefill=prefill),
        )
