"""Parts that families share because they are the same in all of them, to the letter.

Whatever differs between two families stands in their own files.

Letters: T rows, H query heads, K kv heads, D head dim, C hidden, I inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.coded_attention import coded_attention
from osaurus.kernels.native.program import Activation
from osaurus.kernels.norm import rms_norm
from osaurus.kernels.paged_attention import decode_attention, prefill_attention
from osaurus.models.base import ForwardBatch, LayerMemory
from osaurus.models.drafts import draft_tensors
from osaurus.models.loading import WeightLoader
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.linear import Embedding, Linear, fused_linear


class RmsNorm:
    """x / rms(x) * weight over the last dimension, computed in float32.

    With `add_one` the stored weight is the distance from one, as Gemma keeps it.
    """

    def __init__(
        self, loader: WeightLoader, name: str, size: int, eps: float, add_one: bool = False
    ) -> None:
        weight = loader.vector(f"{name}.weight", size)
        self.weight = weight + 1 if add_one else weight
        self.eps = eps

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x: [..., size] float32; returns the same shape in `dtype`."""
        return rms_norm(x, self.weight, self.eps, dtype)


class CentredNorm:
    """The same of x less its mean, without a bias (LayerNorm, arXiv:1607.06450)."""

    def __init__(self, loader: WeightLoader, name: str, size: int, eps: float) -> None:
        self.weight = loader.vector(f"{name}.weight", size)
        self.eps = eps

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x: [..., size] float32; returns the same shape in `dtype`."""
        return rms_norm(x - x.mean(dim=-1, keepdim=True), self.weight, self.eps, dtype)


#: The projections of a gated MLP, as most families store them.
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up as one product (arXiv:2002.05202).

    `names` are others that the bundle may have for gate, up and down.
    """

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        hidden: int,
        inner: int,
        activation: Callable[[Tensor], Tensor] = F.silu,
        names: tuple[str, str, str] = MLP_NAMES,
    ) -> None:
        gate, up, down = names if loader.has(f"{prefix}.{names[0]}.weight") else MLP_NAMES
        if loader.has(f"{prefix}.gate_up_proj.weight"):
            self.gate_up = loader.linear([f"{prefix}.gate_up_proj"], [2 * inner], hidden)
        else:
            pair = [f"{prefix}.{gate}", f"{prefix}.{up}"]
            self.gate_up = loader.linear(pair, [inner, inner], hidden)
        self.down = loader.linear([f"{prefix}.{down}"], [hidden], inner)
        self.activation = activation

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor, num_small: int) -> Tensor:
        """x: [T, C] in the compute dtype; returns the same."""
        gate, up = self.gate_up(x, num_small).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up, num_small)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


#: `hidden_act` and `hidden_activation` -> the function.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu_pytorch_tanh": gelu_tanh,
}

#: Those that native kernels have.
NATIVE_ACTIVATIONS: dict[Callable[[Tensor], Tensor], Activation] = {
    F.silu: "silu",
    gelu_tanh: "gelu_tanh",
}


def activation_named(name: object) -> Callable[[Tensor], Tensor]:
    """Raises `UnsupportedBundle` for one that no family here uses."""
    if name not in ACTIVATIONS:
        raise UnsupportedBundle(f"config.json: activation {name!r} is not supported")
    return ACTIVATIONS[str(name)]


def store(rows: Tensor, batch: ForwardBatch, memory: LayerMemory) -> None:
    """Put the rows' keys and values, [T, K, Dk + Dv], into their slots."""
    flat = memory.storage.view(-1, memory.storage.shape[-1])
    written = rows.to(flat.dtype).reshape(-1, flat.shape[1])
    flat.index_copy_(0, batch.groups[memory.group].write_rows, written)


def attend(
    q: Tensor,
    batch: ForwardBatch,
    memory: LayerMemory,
    k_dim: int,
    latent_dim: int | None = None,
) -> Tensor:
    """Attention of each row over what its slot holds, its own keys and values included.

    q: [T, H, Dk] float32, already scaled. Returns [T, H, Dv] in the storage's dtype.
    """
    group, dtype = batch.groups[memory.group], memory.storage.dtype
    if group.decode is not None:
        return decode_attention(q, memory.storage, group.decode, k_dim, latent_dim).to(dtype)
    if group.coded is not None and memory.coded is not None:
        return coded_attention(q, memory.storage, memory.coded, group.coded, k_dim).to(dtype)
    if group.prefill is not None:
        return prefill_attention(q.to(dtype), memory.storage, group.prefill, k_dim, latent_dim)
    raise ValueError("a group batch carries a plan that its layers can follow")


def load_head(
    loader: WeightLoader,
    embed: Embedding,
    shape: tuple[int, int],
    tied: bool,
    embed_name: str = "model.embed_tokens.weight",
    name: str = "lm_head.weight",
) -> Embedding:
    """The head, or the embedding where the config ties them. A stored head of other values
    wins, as in transformers: somebody trained it."""
    if tied and (not loader.has(name) or loader.is_copy(name, embed_name)):
        loader.skip(name)
        return embed
    return loader.embedding(name, *shape)


def skip_draft_layers(loader: WeightLoader, config: Mapping[str, Any]) -> None:
    """Leave the layers that predict further tokens to a drafter."""
    loader.skip(*draft_tensors(config, loader.names()).values())


def half_split_rows(heads: int, dim: int, first: int, count: int) -> Tensor:
    """Where each output row of a projection to `heads` x `dim` lies when the `count` rotary
    rows of a head, from `first` on, are stored as adjacent pairs: reading rows in this order
    puts them into the half-split order that the kernels use."""
    pairs = torch.arange(first, first + count).view(-1, 2).t().flatten()
    head = torch.cat([torch.arange(first), pairs, torch.arange(first + count, dim)])
    return (torch.arange(heads).unsqueeze(1) * dim + head).flatten()


def load_reordered(
    loader: WeightLoader,
    names: Sequence[str],
    orders: Sequence[Tensor | None],
    sizes: Sequence[int],
    in_features: int,
) -> Linear:
    """One layer of several projections, the rows of each taken in its order (None: as stored)."""
    weights: list[GroupedWeight | Tensor] = []
    biases = loader.biases(names, sizes)
    for i, (name, size, order) in enumerate(zip(names, sizes, orders, strict=True)):
        weight, bias = loader.matrix(f"{name}.weight", (size, in_features)), biases[i]
        if order is not None:
            order = order.to(loader.device)
            weight = (
                weight.select_rows(order) if isinstance(weight, GroupedWeight) else weight[order]
            )
            biases[i] = None if bias is None else bias[order]
        weights.append(weight)
    return fused_linear(weights, biases)


def load_taps(loader: WeightLoader, name: str, channels: int, taps: int) -> tuple[Tensor, bool]:
    """The weights of a depthwise convolution, [channels, taps] float32, and whether they are
    stored MLX's way: [channels, taps, 1], where others have [channels, 1, taps]."""
    try:
        return loader.tensor(name, (channels, 1, taps)).squeeze(1), False
    except UnsupportedBundle as error:
        for shape in ((channels, taps, 1), (channels, taps)):
            try:
                stored = loader.tensor(name, shape)
            except UnsupportedBundle:
                continue
            return stored.view(channels, taps), len(shape) == 3
        raise error
