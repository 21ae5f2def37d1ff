"""A transformers model with its own cache, one slot a forward: the form for what fits neither
blocks nor stacked states. Correct before fast: each forward copies a slot's cache.

Letters: T rows, L logits rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from osaurus.models.base import ForwardBatch, ForwardOutput, LayerMemory
from osaurus.models.transformers_model import NetworkCall, TransformersModel
from osaurus.models.transformers_own_cache import OwnCaches
from osaurus.topology.base import LayerTopology
from osaurus.topology.composite import NoMemory


class SingleSlotModel(TransformersModel):
    """Implements `models.base.Model`; attention, masks and cache are transformers' own."""

    route = "single-slot"

    def __init__(self, call: NetworkCall, caches: OwnCaches, **common: Any) -> None:
        super().__init__(call, **common)
        self._caches = caches
        self._topology = tuple(layer.topology or NoMemory() for layer in caches.layers)

    @property
    def keeps_state(self) -> bool:
        return True

    @property
    def layers_topology(self) -> tuple[LayerTopology, ...]:
        return self._topology

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> ForwardOutput:
        self.check_batch(batch)
        assert batch.state_slot is not None
        wanted = set(batch.logits_rows.tolist())
        found: dict[int, Tensor] = {}
        spans = zip(batch.q_start, batch.q_start[1:], batch.kv_len, strict=False)
        for slot, (start, end, length) in zip(batch.state_slot.tolist(), spans, strict=True):
            before = length - (end - start)
            cache = self._caches.load(kv, slot, before)
            # Decode rows run one by one, as they would have the first time.
            step = end - start if batch.num_small == 0 and self.continues_chunks else 1
            for first in range(start, end, step):
                rows = range(first, first + step)
                logits = self._run(batch, rows, [r for r in rows if r in wanted], cache)
                found.update(zip([r for r in rows if r in wanted], logits, strict=True))
            self._caches.save(cache, kv, slot, before, length)
        if not found:
            return ForwardOutput(logits=None)
        return ForwardOutput(logits=torch.stack([found[r] for r in batch.logits_rows.tolist()]))

    def _run(self, batch: ForwardBatch, rows: range, wanted: Sequence[int], cache: Any) -> Tensor:
        """[len(wanted), V] float32 of some rows of one slot, [1, T]."""
        which = slice(rows.start, rows.stop)
        given: dict[str, Any] = {"position_ids": batch.positions[..., which].unsqueeze(-2)}
        if batch.embeds is not None:
            given["inputs_embeds"] = batch.embeds[which].to(self.kv_dtype).unsqueeze(0)
        else:
            given["input_ids"] = batch.token_ids[which].unsqueeze(0)
        kept = torch.tensor([row - rows.start for row in wanted], dtype=torch.int64)
        given["logits_to_keep"] = kept.to(self.device)
        return self.call(given, cache)[0].float()
