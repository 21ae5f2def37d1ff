"""The experts of one layer and their weights in the forms in which bundles store them.

One tensor for each expert (`experts.3.gate_proj.weight`), or all of a layer in one of three
axes: transformers' fused `experts.gate_up_proj`, MLX's `switch_mlp.gate_proj.weight`.

Letters: T rows, C hidden, E experts, I inner width, k experts a row takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.moe import mix_experts, route_sigmoid, router_scores
from osaurus.models.fields import refuse, require_counts
from osaurus.models.layers import MLP_NAMES, GatedMlp
from osaurus.models.loading import WeightLoader
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.linear import Linear, fused_linear


class Experts:
    """E gated MLPs, of which each row asks the k that were chosen for it."""

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        count: int,
        hidden: int,
        inner: int,
        names: tuple[str, str, str] = MLP_NAMES,
    ) -> None:
        """`prefix` is the MLP's: the experts' tensors lie under it. `names` are those of one
        expert's gate, up and down."""
        gate_up, down = _load(loader, prefix, count, hidden, inner, names)
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
    loader: WeightLoader,
    prefix: str,
    count: int,
    hidden: int,
    inner: int,
    names: tuple[str, str, str],
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
    gate, up, down = names
    return (
        [loader.linear([f"{path}.{gate}", f"{path}.{up}"], [inner, inner], hidden) for path in one],
        [loader.linear([f"{path}.{down}"], [hidden], inner) for path in one],
    )


def _linears(weights: list[GroupedWeight | Tensor]) -> list[Linear]:
    return [fused_linear([weight], [None]) for weight in weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouting:
    """Published spellings of what `SharedMoe` is made by."""

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> SigmoidRouting:
        """Raises `UnsupportedBundle` naming a field that is missing or cannot be served."""
        require_counts(config, ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"])
        refuse(config, "scoring_func", ["sigmoid"])
        refuse(config, "topk_method", ["noaux_tc"])
        refuse(config, "moe_layer_freq", [1])
        count, groups = config["n_routed_experts"], int(config.get("n_group") or 1)
        if count % groups:
            raise UnsupportedBundle(
                f"config.json: n_routed_experts {count} is no multiple of n_group {groups}"
            )
        return cls(
            n_routed_experts=count,
            num_experts_per_tok=config["num_experts_per_tok"],
            moe_intermediate_size=config["moe_intermediate_size"],
            n_shared_experts=int(config.get("n_shared_experts") or 0),
            n_group=groups,
            topk_group=int(config.get("topk_group") or 1),
            norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            routed_scaling_factor=float(config.get("routed_scaling_factor") or 1.0),
        )


class SharedMoe:
    """Experts chosen by a sigmoid router, beside one that every row asks (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2)."""

    def __init__(
        self, settings: SigmoidRouting, loader: WeightLoader, prefix: str, hidden: int
    ) -> None:
        self._settings = settings
        count, inner = settings.n_routed_experts, settings.moe_intermediate_size
        self._router = loader.tensor(f"{prefix}.gate.weight", (count, hidden))
        self._bias = loader.vector(f"{prefix}.gate.e_score_correction_bias", count)
        self._experts = Experts(loader, prefix, count, hidden, inner)
        self._shared = None
        if settings.n_shared_experts:
            width = inner * settings.n_shared_experts
            self._shared = GatedMlp(loader, f"{prefix}.shared_experts", hidden, width)

    @property
    def nbytes(self) -> int:
        shared = self._shared.nbytes if self._shared is not None else 0
        return self._router.nbytes + self._experts.nbytes + shared

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        """x: [T, C] in the compute dtype; returns [T, C] float32."""
        settings = self._settings
        experts, weights = route_sigmoid(
            router_scores(x, self._router),
            self._bias,
            settings.num_experts_per_tok,
            groups=settings.n_group,
            top_groups=settings.topk_group,
            normalize=settings.norm_topk_prob,
            scale=settings.routed_scaling_factor,
        )
        out = self._experts(x, experts, weights, num_small)
        return out if self._shared is None else out + self._shared(x, num_small)
