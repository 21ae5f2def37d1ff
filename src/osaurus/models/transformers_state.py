"""State of a transformers cache in our slots: convolution windows and recurrent matrices.

transformers keeps them by layer and by number within the layer (`conv_states`,
`recurrent_states`), with flags that say which exist. A slot's arrays are their float32 copies.

Letters: B slots of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from osaurus.models.base import LayerMemory
from osaurus.topology.base import StateArray
from osaurus.topology.recurrent import StateTopology

#: Tokens of a piece that a Mamba-2 layer's scan takes at once. The scan in plain torch pads a
#: prompt to whole pieces and holds [tokens, piece, heads, state size] in float32: with the 256
#: of most configs that is gigabytes for any prompt, and several times the time.
_SCAN_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptArray:
    """One array of a cache layer: which dict it is in, its number there, its type."""

    is_window: bool
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        kind = "conv" if self.is_window else "state"
        return kind if self.index == 0 else f"{kind}{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForm:
    """A layer with state: its number in the cache and its arrays, in the topology's order."""

    layer: int
    arrays: tuple[KeptArray, ...]

    @property
    def topology(self) -> StateTopology:
        kind = "short_conv" if all(array.is_window for array in self.arrays) else "recurrent"
        arrays = tuple(StateArray(name=array.name, shape=array.shape) for array in self.arrays)
        return StateTopology(kind=kind, arrays=arrays)


def shorten_scans(network: nn.Module) -> None:
    """Have Mamba-2 layers scan in short pieces: how long they are changes the rounding only."""
    module: Any
    for module in network.modules():
        piece = getattr(module, "chunk_size", None)
        if isinstance(piece, int) and hasattr(module, "ssm_state_size"):
            module.chunk_size = min(piece, _SCAN_TOKENS)


def learn_states(cache: Any) -> tuple[StateForm, ...]:
    """The layers of a cache that has seen one token of one slot, and keep state since."""
    forms: list[StateForm] = []
    for layer, kept in enumerate(cache.layers):
        arrays = [
            KeptArray(
                is_window=window, index=index, shape=tuple(value.shape[1:]), dtype=value.dtype
            )
            for window, name in ((True, "conv_states"), (False, "recurrent_states"))
            for index, value in getattr(kept, name, {}).items()
            if value is not None
        ]
        if arrays:
            forms.append(StateForm(layer=layer, arrays=tuple(arrays)))
    return tuple(forms)


class CacheStates:
    """Moves the state of some slots into a cache and back."""

    def __init__(self, forms: Sequence[StateForm], memory: Sequence[LayerMemory]) -> None:
        self._forms, self._memory = forms, memory

    def load(self, cache: Any, slots: Tensor) -> None:
        """slots: [B] int64. The cache then stands where those slots stand."""
        for form in self._forms:
            layer = cache.layers[form.layer]
            for array, storage in zip(form.arrays, self._memory[form.layer].state, strict=True):
                value = storage.index_select(0, slots).to(array.dtype)
                layer.dtype, layer.device = array.dtype, value.device
                layer.has_previous_state[array.index] = True
                if array.is_window:
                    layer.conv_states[array.index] = value
                    layer.is_conv_states_initialized[array.index] = True
                    layer.conv_kernel_size[array.index] = array.shape[-1]
                else:
                    layer.recurrent_states[array.index] = value
                    layer.is_recurrent_states_initialized[array.index] = True

    def save(self, cache: Any, slots: Tensor) -> None:
        for form in self._forms:
            layer = cache.layers[form.layer]
            for array, storage in zip(form.arrays, self._memory[form.layer].state, strict=True):
                kept = layer.conv_states if array.is_window else layer.recurrent_states
                storage.index_copy_(0, slots, kept[array.index].to(storage.dtype))
