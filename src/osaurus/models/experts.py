"""The experts of one layer and their weights in the forms in which bundles store them.

One tensor for each expert (`experts.3.gate_proj.weight`), or all of a layer in one of three
axes: transformers' fused `experts.gate_up_proj`, MLX's `switch_mlp.gate_proj.weight`.

Letters: T rows, C hidden, E experts, I inner width, k experts a row takes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from osaurus.kernels.moe import mix_experts
from osaurus.models.loading import WeightLoader
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.linear import Linear, fused_linear


class Experts:
    """E gated MLPs, of which each row asks the k that were chosen for it."""

    def __init__(
        self, loader: WeightLoader, prefix: str, count: int, hidden: int, inner: int
    ) -> None:
        """`prefix` is the MLP's: the experts' tensors lie under it."""
        gate_up, down = _load(loader, prefix, count, hidden, inner)
        self._gate_up, self._down = gate_up, down

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self._gate_up, *self._down))

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, num_small: int) -> Tensor:
        """x: [T, C] in the compute dtype; experts, weights: [T, k]. Returns [T, C] float32."""
        return mix_experts(x, experts, weights, num_small, self._answer)

    def _answer(self, expert: int, x: Tensor, num_small: int) -> Tensor:
        gate, up = self._gate_up[expert](x, num_small).chunk(2, dim=-1)
        return self._down[expert](F.silu(gate) * up, num_small)


def _load(
    loader: WeightLoader, prefix: str, count: int, hidden: int, inner: int
) -> tuple[list[Linear], list[Linear]]:
    """(gate and up side by side, down) of each expert."""
    fused = f"{prefix}.experts.gate_up_proj"
    if loader.has(fused):
        gate_up = loader.stack(fused, (count, 2 * inner, hidden))
        down = loader.stack(f"{prefix}.experts.down_proj", (count, hidden, inner))
        return _linears(gate_up), _linears(down)
    stacked = f"{prefix}.switch_mlp"
    if loader.has(f"{stacked}.gate_proj.weight"):
        gate, up = (
            loader.stack(f"{stacked}.{name}_proj.weight", (count, inner, hidden))
            for name in ("gate", "up")
        )
        down = loader.stack(f"{stacked}.down_proj.weight", (count, hidden, inner))
        pairs = zip(gate, up, strict=True)
        return [fused_linear(pair, [None, None]) for pair in pairs], _linears(down)
    one = [f"{prefix}.experts.{expert}" for expert in range(count)]
    return (
        [
            loader.linear([f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], hidden)
            for name in one
        ],
        [loader.linear([f"{name}.down_proj"], [hidden], inner) for name in one],
    )


def _linears(weights: list[GroupedWeight | Tensor]) -> list[Linear]:
    return [fused_linear([weight], [None]) for weight in weights]
