"""A transformers model behind `models.base.Model`.

*Packed*: nothing but attention remembers, so a step's rows are one row of tokens [1, T] with
explicit positions. *Stacked*: layers keep state, so a prompt runs one slot a forward, [1, T],
and decode rows of different slots are a batch, [B, 1], on states gathered from their slots.
The third form, for a cache that fits neither, is in `transformers_single.py`.

Letters: T rows, S slots, L logits rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.models.base import ForwardBatch, ForwardOutput, GroupBatch, LayerMemory
from osaurus.models.transformers_attention import (
    AttentionCall,
    Step,
    during,
    select_prefill_row,
    select_rows,
)
from osaurus.models.transformers_state import CacheStates, StateForm
from osaurus.topology.base import LayerTopology

#: What architectures and versions call the cache of a forward.
_CACHE_KEYWORDS = ("past_key_values", "cache_params", "cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a probe found: the attention calls in order, the layer whose memory each uses, the
    layers with state, and every layer's topology."""

    calls: tuple[AttentionCall, ...]
    call_layers: tuple[int, ...]
    states: tuple[StateForm, ...]
    topology: tuple[LayerTopology, ...]


class NetworkCall:
    """The network, called with what its class accepts."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self._accepted = frozenset(inspect.signature(network.forward).parameters)
        found = [name for name in _CACHE_KEYWORDS if name in self._accepted]
        if not found:
            raise UnsupportedBundle(f"{type(network).__name__} takes no cache")
        self._cache_keyword = found[0]

    def __call__(self, given: dict[str, Any], cache: Any = None) -> Tensor:
        """Logits [B, T, V] of a forward; [1, L, V] of `logits_to_keep` [L] where that is given."""
        arguments = {**given, "use_cache": cache is not None, "return_dict": True}
        if cache is not None:
            arguments[self._cache_keyword] = cache
        rows = arguments.get("logits_to_keep")
        for name in ("logits_to_keep", "position_ids"):
            if name not in self._accepted:
                arguments.pop(name, None)
        logits: Tensor = self.network(**arguments).logits
        if rows is not None and "logits_to_keep" not in self._accepted:
            logits = logits[:, rows]
        return logits


class TransformersModel:
    """What both forms of `models.base.Model` share. `call` says how the network is called."""

    reads_coded_kv = False
    #: How its rows run, for people.
    route = ""
    #: Whether a chunk after the first gives what the whole prompt gives: some architectures scan
    #: a chunk from an empty state whatever came before. Those run a token at a time.
    continues_chunks = True

    def __init__(
        self, call: NetworkCall, *, max_context_tokens: int, kv_dtype: torch.dtype, nbytes: int
    ) -> None:
        self.call = call
        self.vocab_size: int = call.network.config.get_text_config().vocab_size
        self.max_context_tokens = max_context_tokens
        self.kv_dtype = kv_dtype
        self.device: torch.device = call.network.device
        self.nbytes = nbytes

    @property
    def layers_topology(self) -> tuple[LayerTopology, ...]:
        raise NotImplementedError

    @property
    def keeps_state(self) -> bool:
        """Whether prompts run one slot a forward."""
        raise NotImplementedError

    def reads_block_tables(self, kv: Sequence[LayerMemory], *, prefill: bool) -> bool:
        return False

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> ForwardOutput:
        raise NotImplementedError

    def check_batch(self, batch: ForwardBatch) -> None:
        if batch.taps:
            raise ValueError("hidden states of a model of the transformers route are not given")
        if batch.num_small not in (0, batch.num_rows):
            raise ValueError("decode and prefill rows do not share a forward")


class RowsModel(TransformersModel):
    """Packed or stacked. `new_cache` makes an empty cache of the model's own kind whose
    attention layers keep nothing."""

    def __init__(
        self, call: NetworkCall, learnt: Learnt, new_cache: Callable[[], Any], **common: Any
    ) -> None:
        super().__init__(call, **common)
        self.learnt = learnt
        self.route = "stacked" if learnt.states else "packed"
        self.reads_coded_kv = not learnt.states and all(call.is_plain for call in learnt.calls)
        self._new_cache = new_cache

    @property
    def keeps_state(self) -> bool:
        return bool(self.learnt.states)

    @property
    def layers_topology(self) -> tuple[LayerTopology, ...]:
        return self.learnt.topology

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> ForwardOutput:
        self.check_batch(batch)
        if not self.learnt.states:
            logits = self._run(batch, kv, slice(None), batch.groups, None)
            return ForwardOutput(logits=logits)
        if batch.num_small == 0:
            logits = self._prefill(batch, kv)
        else:
            logits = self._decode(batch, kv)
        return ForwardOutput(logits=logits)

    def _prefill(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> Tensor | None:
        """One slot's chunk, [1, T], on that slot's state."""
        states = self._states(kv)
        assert batch.state_slot is not None
        before = batch.kv_len[0] - batch.num_rows
        if not self.continues_chunks:
            return self._prefill_singly(batch, kv, states, before)
        cache = self._new_cache()
        if before:
            states.load(cache, batch.state_slot)
        cache.seen = before
        logits = self._run(batch, kv, slice(None), batch.groups, cache)
        states.save(cache, batch.state_slot)
        return logits

    def _prefill_singly(
        self, batch: ForwardBatch, kv: Sequence[LayerMemory], states: CacheStates, before: int
    ) -> Tensor | None:
        assert batch.state_slot is not None
        cache, found = self._new_cache(), []
        if before:
            states.load(cache, batch.state_slot)
        for row in range(batch.num_rows):
            cache.seen = before + row
            groups = [select_prefill_row(group, row, batch.num_rows) for group in batch.groups]
            rows = torch.tensor([row], device=self.device)
            found.append(self._run(batch, kv, rows, groups, cache))
        states.save(cache, batch.state_slot)
        if batch.logits_rows.numel() == 0:
            return None
        return torch.cat([part for part in found if part is not None])[batch.logits_rows]

    def _decode(self, batch: ForwardBatch, kv: Sequence[LayerMemory]) -> Tensor | None:
        """One token of every slot at a time, [B, 1]: a slot that catches up has several rows."""
        states = self._states(kv)
        assert batch.state_slot is not None
        starts = torch.tensor(batch.q_start[:-1])
        counts = torch.tensor(batch.q_start[1:]) - starts
        before = torch.tensor(batch.kv_len) - counts
        found: list[tuple[Tensor, Tensor]] = []
        for index in range(int(counts.max())):
            for is_first in (True, False):
                # A slot without tokens has no state: the model has a path of its own for it.
                live = (counts > index) & ((before + index == 0) == is_first)
                if not bool(live.any()):
                    continue
                rows, slots = starts[live] + index, batch.state_slot[live.to(self.device)]
                rows = rows.to(self.device)
                groups = batch.groups
                if rows.numel() < batch.num_rows:
                    groups = tuple(select_rows(g, rows, batch.num_rows) for g in batch.groups)
                cache = self._new_cache()
                if not is_first:
                    states.load(cache, slots)
                cache.seen = int((before[live] + index).max())
                logits = self._run(batch, kv, rows, groups, cache)
                states.save(cache, slots)
                assert logits is not None
                found.append((rows, logits))
        if batch.logits_rows.numel() == 0:
            return None
        out = found[0][1].new_empty(batch.num_rows, found[0][1].shape[1])
        for rows, logits in found:
            out[rows] = logits
        return out.index_select(0, batch.logits_rows)

    def _run(
        self,
        batch: ForwardBatch,
        kv: Sequence[LayerMemory],
        rows: Tensor | slice,
        groups: Sequence[GroupBatch],
        cache: Any,
    ) -> Tensor | None:
        """One forward of the network over some of the batch's rows, which come as [B, 1] when
        they are named and as [1, T] when they are all. Returns float32 logits: of every row
        when they are named, else of `logits_rows`."""
        stacked = isinstance(rows, Tensor)
        ids, positions = batch.token_ids[rows], batch.positions[..., rows]
        axis = -1 if stacked else -2
        given: dict[str, Any] = {"position_ids": positions.unsqueeze(axis)}
        if batch.embeds is not None:
            given["inputs_embeds"] = (
                batch.embeds[rows].to(self.kv_dtype).unsqueeze(-2 if stacked else 0)
            )
        else:
            given["input_ids"] = ids.unsqueeze(axis)
        if not stacked:
            given["logits_to_keep"] = batch.logits_rows
        step = Step(
            calls=self.learnt.calls,
            memory=[kv[layer] for layer in self.learnt.call_layers],
            groups=groups,
            is_decode=batch.num_small > 0,
        )
        with during(step):
            logits = self.call(given, cache)
        if step.done != len(self.learnt.calls):
            raise RuntimeError(f"{step.done} of {len(self.learnt.calls)} attention calls were made")
        if stacked:
            return logits[:, -1].float()
        return logits[0].float() if batch.logits_rows.numel() else None

    def _states(self, kv: Sequence[LayerMemory]) -> CacheStates:
        return CacheStates(self.learnt.states, kv)
