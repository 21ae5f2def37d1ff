"""Where the experts of a transformers model lie in a bundle, one matrix for each expert.

transformers keeps the experts of a layer in stacked tensors, which many bundles do not: they
store each expert's matrices, quantized or plain, or the stack in a form of its own. Read expert
by expert they stay quantized, or become so, without the stack ever being whole in memory.

In: the model's expert modules, stored names, and transformers' own word for what becomes of a
name. Out: for each stacked tensor the stored matrices of each expert. Letters: E experts, N
output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from osaurus.models.loading import WeightLoader
from osaurus.models.transformers_experts import ExpertLayers, is_experts
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.linear import Linear, fused_linear

_SUFFIX = ".weight"


@dataclass(frozen=True, slots=True)
class Renamed:
    """What becomes of a stored tensor: all of `target` under another name where `pattern` is None,
    else part of it. `merged` are the patterns whose tensors are stacked there, those of one expert
    below each other in this order; empty where it is anything else."""

    target: str
    pattern: str | None = None
    merged: tuple[str, ...] = ()


Rename = Callable[[str], Renamed]


@dataclass(frozen=True, slots=True)
class Stack:
    """One stacked tensor [E, N, K], or [E, K, N] where the module says that it is transposed:
    `whole`, its stored name; or `parts[e]`, the matrices of expert e below each other."""

    whole: str | None = None
    parts: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> Iterable[str]:
        return [self.whole] if self.whole else [name for part in self.parts for name in part]


def find_stacks(
    modules: Mapping[str, nn.Module], names: Mapping[str, str], rename: Rename
) -> dict[str, Stack]:
    """The stacks that can be read expert by expert, by the model's own name of each. `names`:
    stored names by what transformers is to be given for them."""
    wanted = {
        f"{path}.{stack}": module.num_experts
        for path, module in modules.items()
        if is_experts(module)
        for stack in stack_names(module)
    }
    found: dict[str, dict[str, list[str]]] = {}
    orders: dict[str, tuple[str, ...]] = {}
    stacks: dict[str, Stack] = {}
    for own in sorted(names, key=_natural) if wanted else ():
        if (target := own.removesuffix(_SUFFIX)) in wanted:
            stacks[target] = Stack(whole=names[own])
            continue
        renamed = rename(own)
        if renamed.target not in wanted:
            continue
        if renamed.pattern is None:
            stacks.setdefault(renamed.target, Stack(whole=names[own]))
        elif renamed.pattern in renamed.merged:
            orders[renamed.target] = renamed.merged
            parts = found.setdefault(renamed.target, {})
            parts.setdefault(renamed.pattern, []).append(names[own])
    for target, parts in found.items():
        columns = [parts.get(pattern, []) for pattern in orders[target]]
        if target not in stacks and all(len(part) == wanted[target] for part in columns):
            stacks[target] = Stack(parts=tuple(zip(*columns, strict=True)))
    return stacks


def stack_names(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def load_experts(
    path: str, module: Any, stacks: Mapping[str, Stack], loader: WeightLoader
) -> ExpertLayers | None:
    """One layer for each expert of `module`, read from the bundle; None unless both of its
    stacks can be."""
    found = [stacks.get(f"{path}.{name}") for name in stack_names(module)]
    if not all(found):
        return None
    layers: list[tuple[Linear, ...]] = []
    for name, stack in zip(stack_names(module), found, strict=True):
        assert stack is not None
        shape = tuple(getattr(module, name).shape)
        bias = getattr(module, f"{name}_bias").data if module.has_bias else None
        made: list[Linear] = []
        for expert, weights in enumerate(_weights(stack, shape, module.is_transposed, loader)):
            own = None if bias is None else bias[expert].to(loader.device, copy=True)
            if len(weights) == 1 or own is None:
                biases: list[Tensor | None] = [own, *[None] * (len(weights) - 1)]
            else:
                biases = list(own.split([weight.shape[0] for weight in weights]))
            made.append(fused_linear(weights, biases))
        delattr(module, name)
        layers.append(tuple(made))
    return ExpertLayers(*layers)


def _weights(
    stack: Stack, shape: tuple[int, ...], transposed: bool, loader: WeightLoader
) -> Iterable[list[GroupedWeight | Tensor]]:
    count, n, k = (shape[0], shape[2], shape[1]) if transposed else shape
    if stack.whole is not None:
        for weight in loader.members(stack.whole, (count, n, k), transposed=transposed):
            yield [weight]
        return
    for parts in stack.parts:
        yield [loader.matrix(name, (n // len(parts), k)) for name in parts]


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Numbers in a name in the order of their values: expert 10 after expert 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
