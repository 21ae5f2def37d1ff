"""Whether the route computes what a transformers model computes by itself.

Two short prompts, one cut in two, decoded side by side, against one forward of each whole
sequence. What an architecture keeps where the route does not see it (state outside of the
cache, positions counted by itself) shows here, before anybody is answered.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.paged_attention import Span, plan_decode, plan_prefill
from osaurus.models.base import ForwardBatch, GroupBatch, LayerMemory
from osaurus.models.transformers_model import NetworkCall, TransformersModel
from osaurus.topology.base import group_layers

_BLOCK = 16
#: Tokens of both sequences; the last two of each are decoded, the first chunk ends at `_CUT`.
_LENGTHS, _CUT = (7, 5), 3
#: Least likeness of two rows of logits: rounding, and experts chosen by a hair, against a fault.
_LEAST = {torch.float32: 0.9999, torch.bfloat16: 0.97}


@dataclass(frozen=True, slots=True)
class OwnForward:
    """What a network's own forward says of the last two tokens of each sequence."""

    sequences: tuple[list[int], ...]
    logits: tuple[Tensor, ...]  # [2, V] float32 each

    def check(self, model: TransformersModel) -> None:
        """Raise `UnsupportedBundle` unless the route says the same; where a prompt's second
        chunk is what differs, have prompts run a token at a time."""
        least = _LEAST[model.kv_dtype]
        worst = self._worst_likeness(model)
        if worst < least and model.keeps_state:
            model.continues_chunks = False
            worst = self._worst_likeness(model)
        if worst < least:
            raise UnsupportedBundle(
                f"rows that are {model.route} give other logits than its own forward (likeness "
                f"{worst:.4f}): it keeps something that has no place here"
            )

    def _worst_likeness(self, model: TransformersModel) -> float:
        rig = _Rig(model)
        worst = 1.0
        for slot, tokens in enumerate(self.sequences):
            end = len(tokens) - 2
            for first, last in ((0, min(_CUT, end)), (min(_CUT, end), end)):
                if last > first:
                    rig.prefill(slot, tokens[first:last], first)
        for step in range(2):
            places = [len(tokens) - 2 + step for tokens in self.sequences]
            found = rig.decode([s[p] for s, p in zip(self.sequences, places, strict=True)], places)
            for row, expected in zip(found, self.logits, strict=True):
                likeness = _likeness(row, expected[step])
                worst = min(worst, likeness if likeness == likeness else -1.0)
        return worst


def own_forward(call: NetworkCall) -> OwnForward:
    """Run the network as transformers would, with the attention it is set to."""
    vocab_size, device = call.network.config.get_text_config().vocab_size, call.network.device
    step = max(1, vocab_size // 97)
    sequences = tuple(
        [(5 + slot + index * step) % vocab_size for index in range(length)]
        for slot, length in enumerate(_LENGTHS)
    )
    logits: list[Tensor] = []
    for tokens in sequences:
        ids = torch.tensor([tokens], device=device)
        places = torch.arange(len(tokens), device=device).unsqueeze(0)
        with torch.inference_mode():
            found = call({"input_ids": ids, "position_ids": places})
        logits.append(found[0, -2:].float())
    return OwnForward(sequences, tuple(logits))


def _likeness(one: Tensor, other: Tensor) -> float:
    """Cosine of two rows of logits around their means."""
    pair = [row - row.mean() for row in (one, other)]
    return float(torch.nn.functional.cosine_similarity(pair[0], pair[1], dim=0))


class _Rig:
    """Memory of one block and one state slot for each sequence."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        slots, layers = len(_LENGTHS), model.layers_topology
        self._groups = group_layers(layers)
        of_layer = {index: g for g, group in enumerate(self._groups) for index in group.layers}
        self._memory: list[LayerMemory] = []
        for index, topology in enumerate(layers):
            storage = torch.empty(0)
            if (paged := topology.paged) is not None:
                shape = (slots, paged.num_kv_heads, _BLOCK, paged.k_dim + paged.v_dim)
                storage = torch.zeros(shape, dtype=model.kv_dtype, device=model.device)
            state = tuple(
                torch.zeros(slots, *array.shape_at(max(_LENGTHS)), device=model.device)
                for array in topology.arrays
            )
            group = of_layer.get(index, -1)
            self._memory.append(LayerMemory(group=group, storage=storage, state=state))

    def prefill(self, slot: int, tokens: Sequence[int], first: int) -> None:
        self._forward([slot], tokens, [first], decode=False)

    def decode(self, tokens: Sequence[int], places: Sequence[int]) -> Tensor:
        """One token of each sequence; returns logits [S, V]."""
        logits = self._forward(range(len(tokens)), tokens, places, decode=True)
        assert logits is not None
        return logits

    def _forward(
        self, slots: Sequence[int], tokens: Sequence[int], firsts: Sequence[int], *, decode: bool
    ) -> Tensor | None:
        device, count = self._model.device, len(tokens)
        each = 1 if decode else count
        places = [first + i for first in firsts for i in range(each)]
        rows = [slot for slot in slots for _ in range(each)]
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, device=device),
            positions=torch.tensor(places, device=device),
            last_position=max(places),
            num_small=count if decode else 0,
            q_start=tuple(range(0, count + 1, each)),
            kv_len=tuple(first + each for first in firsts),
            slot_mapping=(),
            block_table=(),
            groups=tuple(
                self._group(group, slots, rows, places, firsts, each, decode)
                for group in range(len(self._groups))
            ),
            logits_rows=torch.arange(count if decode else 0, device=device),
            state_slot=torch.tensor(list(slots), device=device),
        )
        return self._model.forward(batch, self._memory).logits

    def _group(
        self,
        group: int,
        slots: Sequence[int],
        rows: Sequence[int],
        places: Sequence[int],
        firsts: Sequence[int],
        each: int,
        decode: bool,
    ) -> GroupBatch:
        topology, device = self._groups[group].topology, self._model.device
        heads = torch.arange(topology.num_kv_heads)
        base = torch.tensor(rows).unsqueeze(1) * topology.num_kv_heads + heads
        written = (base * _BLOCK + torch.tensor(places).unsqueeze(1)).flatten().to(device)
        spans = [
            Span(start=i * each, length=each, first_position=first, blocks=[slot], first_block=0)
            for i, (slot, first) in enumerate(zip(slots, firsts, strict=True))
        ]
        if decode:
            plan = plan_decode(spans, _BLOCK, topology.window, device)
            return GroupBatch(write_rows=written, decode=plan)
        prefill = plan_prefill(spans[0], _BLOCK, topology.window, device)
        return GroupBatch(write_rows=written, prefill=prefill)
