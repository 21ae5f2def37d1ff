"""From stored tensors to layers: decode once, in the compute mode's form.

Every name a family asks for is ticked off, so that a bundle with missing, misshapen or
unexpected tensors is refused before it answers anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from osaurus.bundle.weights import StoredTensor, WeightSource
from osaurus.errors import IncompleteBundle, UnsupportedBundle
from osaurus.quant import gguf
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.linear import (
    DenseEmbedding,
    Embedding,
    Linear,
    QuantizedEmbedding,
    fused_linear,
)

ComputeMode = Literal["float32", "bfloat16"]

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightLoader:
    """Hands out a bundle's tensors in the form of one compute mode, each name once.

    float32 is the oracle mode: everything dequantized. bfloat16 keeps quantized weights
    quantized and the rest in bfloat16; norms are float32 in both.
    """

    def __init__(
        self, source: WeightSource, mode: ComputeMode, device: torch.device | str = "cpu"
    ) -> None:
        self._source = source
        self._mode: ComputeMode = mode
        self.device = torch.device(device)
        self._left = set(source.names())

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self._mode == "float32" else torch.bfloat16

    def has(self, name: str) -> bool:
        return name in self._left

    def skip(self, *names: str) -> None:
        """Leave tensors that the family knows and does not need."""
        self._left.difference_update(names)

    def skip_under(self, *prefixes: str) -> None:
        """The same for every tensor whose name starts with one of `prefixes`."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A 1-D tensor [size], float32 unless told otherwise."""
        stored = self._take(name, (size,))
        return self._dense(stored).to(self.device, dtype or torch.float32)

    def optional_vector(self, name: str, size: int, dtype: torch.dtype) -> Tensor | None:
        return self.vector(name, size, dtype) if self.has(name) else None

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that stays dense in every mode, float32: a router's weight."""
        return self._dense(self._take(name, shape)).to(self.device, torch.float32)

    def matrix(self, name: str, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        """A weight [N, K]: grouped codes when stored so and the mode keeps them, else dense."""
        return self._matrix(self._take(name, shape), shape)

    def stack(self, name: str, shape: tuple[int, int, int]) -> list[GroupedWeight | Tensor]:
        """The E weights [N, K] of one tensor [E, N, K], in order, each as `matrix` gives it."""
        stored, count = self._take(name, shape), shape[0]
        size = stored.data.numel() // count
        return [
            self._matrix(
                replace(stored, shape=shape[1:], data=stored.data[i * size : (i + 1) * size]),
                shape[1:],
            )
            for i in range(count)
        ]

    def _matrix(self, stored: StoredTensor, shape: tuple[int, int]) -> GroupedWeight | Tensor:
        if not gguf.is_quantized(stored.encoding):
            return self._dense(stored).to(self.device, self.dtype)
        weight = gguf.decode(stored.encoding, stored.data, shape)
        if self._mode == "float32":
            return weight.dequantize(torch.float32).to(self.device)
        return GroupedWeight(
            bits=weight.bits,
            group_size=weight.group_size,
            codes=weight.codes.to(self.device),
            scale=weight.scale.to(self.device),
            bias=weight.bias.to(self.device),
        )

    def linear(self, names: Sequence[str], sizes: Sequence[int], in_features: int) -> Linear:
        """One layer of the projections `<name>.weight`, with their biases where stored."""
        weights = [
            self.matrix(f"{name}.weight", (size, in_features))
            for name, size in zip(names, sizes, strict=True)
        ]
        return fused_linear(weights, self.biases(names, sizes))

    def biases(self, names: Sequence[str], sizes: Sequence[int]) -> list[Tensor | None]:
        """`<name>.bias` of each projection, None where the bundle has none."""
        return [
            self.optional_vector(f"{name}.bias", size, self.dtype)
            for name, size in zip(names, sizes, strict=True)
        ]

    def is_copy(self, name: str, other: str) -> bool:
        """Whether two stored tensors hold the same values, so that one can serve as both."""
        first, second = self._source.get(name), self._source.get(other)
        return first.encoding == second.encoding and torch.equal(first.data, second.data)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        weight = self.matrix(name, (vocab_size, hidden_size))
        if isinstance(weight, GroupedWeight):
            return QuantizedEmbedding(weight)
        return DenseEmbedding(weight)

    def finish(self) -> None:
        """Raise `UnsupportedBundle` when tensors are left that nobody asked for: the config
        would describe another network than the weights."""
        if self._left:
            names = sorted(self._left)
            shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
            raise UnsupportedBundle(f"{len(names)} unexpected tensors in the weights: {shown}")

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name not in self._left:
            raise IncompleteBundle(
                f"tensor {name} is missing from the weights; the bundle looks unfinished"
            )
        stored = self._source.get(name)
        if tuple(stored.shape) != shape:
            raise UnsupportedBundle(
                f"tensor {name} has shape {tuple(stored.shape)}, the config asks for {shape}"
            )
        self._left.remove(name)
        return stored

    def _dense(self, stored: StoredTensor) -> Tensor:
        if gguf.is_quantized(stored.encoding):
            shape = tuple(stored.shape)
            if len(shape) != 2:
                raise UnsupportedBundle(f"quantized tensor {stored.name} of shape {shape}")
            return gguf.decode(stored.encoding, stored.data, shape).dequantize(torch.float32)
        if stored.encoding not in _DENSE:
            raise UnsupportedBundle(
                f"tensor {stored.name}: encoding {stored.encoding} is not supported yet"
            )
        # A copy: the mapping is read-only, closes when loading ends, and need not be aligned.
        return stored.data.clone().view(_DENSE[stored.encoding]).view(tuple(stored.shape))
