"""The cache of a transformers model as it is, in arrays of our slots.

For what fits neither blocks nor plain states: DeepSeek-V4's pools, an indexer's keys, attention
that a model computes by itself. A probe of a few hundred tokens watches every tensor and number
that the cache's layers keep and finds how each depends on the count n of tokens: always the
same, one row a token, one row for every k tokens, a window, what is left of a run of k. From
then on n alone says what a slot holds, so that snapshots and prefixes work as anywhere else.

One slot runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from osaurus.errors import UnsupportedBundle
from osaurus.models.base import LayerMemory
from osaurus.topology.base import StateArray
from osaurus.topology.recurrent import StateTopology

#: Numbers in a cache layer above this are not waited for: their multiples would take too long.
_LONGEST_RUN = 256
_LONGEST_PROBE = 2048

Growth = Literal["same", "window", "tokens", "runs", "rest"]


@dataclass(frozen=True, slots=True)
class Count:
    """A number that depends on n tokens: k, min(n, k), n, n // k or n % k."""

    growth: Growth
    k: int = 0

    def at(self, num_tokens: int) -> int:
        match self.growth:
            case "same":
                return self.k
            case "window":
                return min(num_tokens, self.k)
            case "tokens":
                return num_tokens
            case "runs":
                return num_tokens // self.k
            case "rest":
                return num_tokens % self.k

    @property
    def most(self) -> int | None:
        """The largest value; None for one without a bound."""
        return {"same": self.k, "window": self.k, "rest": self.k - 1}.get(self.growth)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor [1, ...] of a cache layer under `name` (and `key` of a dict of that name).

    `axis` is the one whose size is `rows`, None where all are fixed. It is there from `since`
    tokens on. `same_as` names another that it is the same tensor as.
    """

    name: str
    key: Any
    shape: tuple[int, ...]  # without the first axis and without `axis`
    dtype: torch.dtype
    axis: int | None
    rows: Count
    since: int
    same_as: tuple[str, Any] | None = None

    @property
    def array(self) -> StateArray:
        name = self.name if self.key is None else f"{self.name}.{self.key}"
        if self.axis is None:
            return StateArray(name=name, shape=self.shape or (1,))
        most = self.rows.most
        if most is not None:
            return StateArray(name=name, shape=(most, *self.shape))
        return StateArray(
            name=name,
            shape=self.shape or (1,),
            tokens_per_row=self.rows.k if self.rows.growth == "runs" else 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptNumber:
    name: str
    key: Any
    value: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayer:
    """What one layer of the cache keeps; `constant` are its other attributes."""

    tensors: tuple[KeptTensor, ...]
    numbers: tuple[KeptNumber, ...]
    constant: Mapping[str, Any]

    @property
    def stored(self) -> tuple[KeptTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.same_as is None)

    @property
    def topology(self) -> StateTopology | None:
        arrays = tuple(tensor.array for tensor in self.stored)
        return StateTopology(kind="own_cache", arrays=arrays) if arrays else None

    def load(self, layer: Any, state: Sequence[Tensor], slot: int, num_tokens: int) -> None:
        """Make a new layer what it was after `num_tokens` in the slot's arrays."""
        for name, value in self.constant.items():
            setattr(layer, name, dict(value) if isinstance(value, dict) else value)
        for number in self.numbers:
            _put(layer, number.name, number.key, number.value.at(num_tokens))
        found: dict[tuple[str, Any], Tensor | None] = {}
        for tensor, storage in zip(self.stored, state, strict=True):
            value = None
            if num_tokens >= tensor.since:
                value = storage[slot]
                if tensor.axis is None:
                    value = value.view(tensor.shape)
                else:
                    value = value[: tensor.rows.at(num_tokens)].view(-1, *tensor.shape)
                    value = value.movedim(0, tensor.axis - 1)
                value = value.unsqueeze(0).to(tensor.dtype, copy=True)
            found[(tensor.name, tensor.key)] = value
        for tensor in self.tensors:
            _put(layer, tensor.name, tensor.key, found[tensor.same_as or (tensor.name, tensor.key)])

    def save(
        self, layer: Any, state: Sequence[Tensor], slot: int, before: int, num_tokens: int
    ) -> None:
        """Write what the layer is after `num_tokens`; of rows that only grow, the new ones."""
        for tensor, storage in zip(self.stored, state, strict=True):
            value = _get(layer, tensor.name, tensor.key)
            if value is None:
                continue
            if tensor.axis is None:
                storage[slot].copy_(value[0].view(storage.shape[1:]))
                continue
            rows = value[0].movedim(tensor.axis - 1, 0)
            count = tensor.rows.at(num_tokens)
            if rows.shape[0] != count:
                raise RuntimeError(f"{tensor.name} has {rows.shape[0]} rows, {count} were expected")
            first = tensor.rows.at(before) if tensor.rows.most is None else 0
            storage[slot, first:count].copy_(
                rows[first:].reshape(count - first, *storage.shape[2:])
            )


def _get(layer: Any, name: str, key: Any) -> Any:
    value = getattr(layer, name)
    return value if key is None else value[key]


def _put(layer: Any, name: str, key: Any, value: Any) -> None:
    if key is None:
        setattr(layer, name, value)
    else:
        getattr(layer, name)[key] = value


#: One layer's attributes at one moment: (name, key) -> a tensor's shape and type, or a number.
Seen = dict[tuple[str, Any], Any]


def learn_own_cache(cache: Any, feed: Callable[[int], None]) -> tuple[OwnLayer, ...]:
    """Watch an empty cache while `feed(count)` runs that many more tokens through the model.

    Raises `UnsupportedBundle` for a value whose dependence on n is none of the known ones.
    """
    runs = [sorted(_whole_numbers(layer)) for layer in cache.layers]
    stops = {1, 2, 3, 5}
    for run in {number for numbers in runs for number in numbers if number < _LONGEST_PROBE}:
        stops |= {run - 1, run, run + 1}
        if run <= _LONGEST_RUN:
            stops |= {2 * run - 1, 2 * run, 2 * run + 1, 3 * run + 1}
    seen: list[list[tuple[int, Seen]]] = [[] for _ in cache.layers]
    fed = 0
    for stop in sorted(stop for stop in stops if stop > 0):
        feed(stop - fed)
        fed = stop
        for history, layer in zip(seen, cache.layers, strict=True):
            history.append((fed, _look(layer)))
    return tuple(
        _fit(layer, history, numbers)
        for layer, history, numbers in zip(cache.layers, seen, runs, strict=True)
    )


def _whole_numbers(layer: Any) -> set[int]:
    """Numbers that a new layer has from its config: windows, rates."""
    return {
        value
        for value in vars(layer).values()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1
    }


def _entries(layer: Any) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            found += [(name, key, part) for key, part in value.items()]
        else:
            found.append((name, None, value))
    return found


def _look(layer: Any) -> Seen:
    seen: Seen = {}
    first: dict[int, tuple[str, Any]] = {}
    for name, key, value in _entries(layer):
        if isinstance(value, Tensor) and value.dim() > 0:
            same = first.setdefault(id(value), (name, key))
            alias = None if same == (name, key) else same
            seen[name, key] = (tuple(value.shape), value.dtype, alias)
        elif value is None or isinstance(value, int | bool):
            seen[name, key] = value
    return seen


def _fit(layer: Any, history: list[tuple[int, Seen]], numbers: list[int]) -> OwnLayer:
    tensors: list[KeptTensor] = []
    counts: list[KeptNumber] = []
    varying: set[str] = set()
    is_sliding = bool(getattr(layer, "is_sliding", False))
    for name, key in history[-1][1]:
        values = [(n, seen.get((name, key))) for n, seen in history]
        label = f"{type(layer).__name__}.{name}"
        if any(isinstance(value, tuple) for _, value in values):
            tensors.append(_fit_tensor(label, name, key, values, numbers, is_sliding))
            varying.add(name)
        elif len({value for _, value in values}) > 1:
            sizes = [(n, value) for n, value in values if isinstance(value, int)]
            if len(sizes) < len(values):
                raise UnsupportedBundle(f"{label} changes in a way that is not understood")
            counts.append(KeptNumber(name=name, key=key, value=_fit_count(label, sizes, numbers)))
            varying.add(name)
    constant = {
        name: value
        for name, value in vars(layer).items()
        if name not in varying or isinstance(value, dict)
    }
    return OwnLayer(tensors=tuple(tensors), numbers=tuple(counts), constant=constant)


def _fit_tensor(
    label: str,
    name: str,
    key: Any,
    values: Sequence[tuple[int, Any]],
    numbers: Sequence[int],
    is_sliding: bool,
) -> KeptTensor:
    there = [(n, value) for n, value in values if value is not None]
    since = there[0][0] if len(there) < len(values) else 0
    if since and (since not in numbers or any(n >= since and v is None for n, v in values)):
        raise UnsupportedBundle(f"{label} appears in a way that is not understood")
    shape, dtype, same_as = there[-1][1]
    if any((v[1], v[2], len(v[0])) != (dtype, same_as, len(shape)) for _, v in there):
        raise UnsupportedBundle(f"{label} changes its type")
    axes = [i for i in range(len(shape)) if len({v[0][i] for _, v in there}) > 1]
    if 0 in axes or len(axes) > 1 or shape[0] != 1:
        raise UnsupportedBundle(f"{label} of shape {list(shape)} grows in a way not understood")
    axis = axes[0] if axes else None
    rows = Count("same", 1)
    if axis is not None:
        sizes = [(n, v[0][axis]) for n, v in there]
        rows = _fit_count(label, sizes, numbers, is_sliding)
    return KeptTensor(
        name=name,
        key=key,
        shape=tuple(size for i, size in enumerate(shape) if i not in (0, axis)),
        dtype=dtype,
        axis=axis,
        rows=rows,
        since=since,
        same_as=same_as,
    )


def _fit_count(
    label: str,
    values: Sequence[tuple[int, int]],
    numbers: Sequence[int],
    is_sliding: bool = False,
) -> Count:
    windows = [Count("window", k) for number in numbers for k in (number - 1, number)]
    candidates = [Count("tokens")]
    candidates += [Count(growth, k) for k in numbers for growth in ("runs", "rest")]
    # A window longer than the probe looks like one row a token.
    candidates = [*windows, *candidates] if is_sliding else [*candidates, *windows]
    for candidate in candidates:
        if all(candidate.at(n) == value for n, value in values):
            return candidate
    raise UnsupportedBundle(f"{label} grows in a way that is not understood: {values[:6]}")


class OwnCaches:
    """Moves one slot's cache out of its arrays and back. `new_cache` makes an empty one."""

    def __init__(self, layers: Sequence[OwnLayer], new_cache: Callable[[], Any]) -> None:
        self.layers, self._new_cache = tuple(layers), new_cache

    def load(self, kv: Sequence[LayerMemory], slot: int, num_tokens: int) -> Any:
        cache = self._new_cache()
        if num_tokens:
            for layer, form, memory in zip(cache.layers, self.layers, kv, strict=True):
                form.load(layer, memory.state, slot, num_tokens)
        return cache

    def save(
        self, cache: Any, kv: Sequence[LayerMemory], slot: int, before: int, num_tokens: int
    ) -> None:
        for layer, form, memory in zip(cache.layers, self.layers, kv, strict=True):
            form.save(layer, memory.state, slot, before, num_tokens)
