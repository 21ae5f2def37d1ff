"""Mixtures of experts of a transformers model through our products, one expert at a time.

transformers keeps all experts of a layer in a few stacked tensors and calls one registered
function for them (its `ExpertsInterface`). Taken apart into our layers they can be quantized,
and a row's answer does not depend on who else chose the same expert.

Letters: T rows, C hidden, E experts, k experts a row takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from osaurus.kernels.moe import mix_experts
from osaurus.models.transformers_attention import num_small_rows
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.linear import Linear, fused_linear
from osaurus.quant.on_load import can_quantize, quantize
from osaurus.types.weights import QuantizeOnLoad

#: Where a module keeps its experts once they are layers of ours.
_ATTRIBUTE = "osaurus_experts"


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """`up` (gate and up as one where there is a gate) and `down` of each expert."""

    up: tuple[Linear, ...]
    down: tuple[Linear, ...]

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.up, *self.down))


def is_experts(module: nn.Module) -> bool:
    """Whether transformers hands this module's work to the registered function."""
    flags = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")
    return all(hasattr(module, flag) for flag in flags)


def own_weight(
    weight: Tensor, on_load: QuantizeOnLoad | None, device: torch.device
) -> GroupedWeight | Tensor:
    """A copy of [N, K] in the form that our layers take: float32 stays in plain numbers."""
    if not on_load or not can_quantize((weight.shape[0], weight.shape[1]), on_load):
        return weight.to(device, copy=True, memory_format=torch.contiguous_format)
    quantized = quantize(weight, on_load)
    if weight.dtype == torch.float32:
        return quantized.dequantize(torch.float32).to(device)
    return quantized.to(device)


def take_apart(module: Any, on_load: QuantizeOnLoad | None, device: torch.device) -> ExpertLayers:
    """Replace the stacked tensors of `module` by one layer for each expert."""
    layers: list[tuple[Linear, ...]] = []
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        stack = getattr(module, name).data
        bias = getattr(module, f"{name}_bias").data if module.has_bias else None
        made: list[Linear] = []
        for expert in range(module.num_experts):
            weight = stack[expert].t() if module.is_transposed else stack[expert]
            part = own_weight(weight, on_load, device)
            own_bias = None if bias is None else bias[expert].to(device, copy=True)
            made.append(fused_linear([part], [own_bias]))
        delattr(module, name)
        layers.append(tuple(made))
    return give_experts(module, ExpertLayers(*layers))


def give_experts(module: Any, layers: ExpertLayers) -> ExpertLayers:
    """Have `experts_function` compute with `layers` for `module`."""
    object.__setattr__(module, _ATTRIBUTE, layers)
    return layers


def experts_function(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """hidden_states: [T, C]; top_k_index, top_k_weights: [T, k]. Returns [T, C]."""
    layers: ExpertLayers = getattr(module, _ATTRIBUTE)

    def apply(expert: int, rows: Tensor, num_small: int) -> Tensor:
        inner = layers.up[expert](rows, num_small)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        return layers.down[expert](inner, num_small)

    # An index past the last expert stands for none.
    nobody = top_k_index >= module.num_experts
    weights = top_k_weights.masked_fill(nobody, 0.0).float()
    experts = top_k_index.clamp(max=module.num_experts - 1)
    rows = hidden_states.shape[0]
    mixed = mix_experts(hidden_states, experts, weights, num_small_rows(rows), apply)
    return mixed.to(hidden_states.dtype)
