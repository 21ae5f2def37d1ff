"""Weights of a bundle into a transformers model, and its linear layers into ours.

Matrices whose stored name is that of one of the model's linear layers come through our loader,
so they stay quantized or are quantized as they are read; transformers sees a stand-in of the
right shape that takes no memory. Everything else transformers loads itself from views of the
mapped files, with its own rules for renaming, merging and splitting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from osaurus.bundle.weights import WeightSource
from osaurus.errors import IncompleteBundle, UnsupportedBundle
from osaurus.models.loading import WeightLoader
from osaurus.models.stored import MatrixStore, typed
from osaurus.models.transformers_attention import num_small_rows
from osaurus.models.transformers_experts import (
    ExpertLayers,
    give_experts,
    is_experts,
    own_weight,
    take_apart,
)
from osaurus.models.transformers_stacks import Rename, Stack, find_stacks, load_experts
from osaurus.quant.grouped import GroupedWeight
from osaurus.quant.linear import DenseEmbedding, Embedding, Linear, fused_linear
from osaurus.quant.scheme import DTYPES
from osaurus.quant.schemes import Schemes
from osaurus.types.weights import QuantizeOnLoad

#: Parts of a checkpoint that a text model has no use for: other senses, drafted tokens.
_OTHER_PARTS = (
    *("vision", "visual", "audio", "multi_modal", "mm_projector", "image_newline"),
    "mtp",
)


class StoredParameter:
    """A stored tensor that transformers reads when its turn comes: it indexes with `...`.

    Read-only pages must not become a parameter, since some models write to theirs as they are
    initialised; so this gives a copy and hands the pages back.
    """

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: object) -> Tensor:
        return self._read()


class RoutedLinear(nn.Module):
    """An `nn.Linear` in place whose product is ours: [..., K] to [..., N] of `dtype`, also
    where a norm that stays in float32 hands it rows of that type."""

    def __init__(self, inner: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype
        self.in_features, self.out_features = inner.in_features, inner.out_features

    @property
    def weight(self) -> Tensor:
        """Some models read its type or shape. That of a quantized layer has no values: to compute
        with it is an error."""
        weight = getattr(self.inner, "weight", None)
        if isinstance(weight, Tensor):
            return weight
        shape = (self.out_features, self.in_features)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.inner, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features, dtype=self.dtype)
        out = self.inner(rows.to(self.dtype), num_small_rows(rows.shape[0]))
        return out.view(*x.shape[:-1], -1)


class RoutedHead(nn.Module):
    """The head in place: [1, L, C] to [1, L, V] float32."""

    def __init__(self, inner: Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        #: Only its dtype is ever asked for.
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        if rows.shape[0] == 0:
            return rows.new_empty(*x.shape[:-1], 0)
        return self.inner.logits(rows).view(*x.shape[:-1], -1)


class WeightMap:
    """Which of a bundle's tensors go where in a model. `skeleton` has shapes and no values."""

    def __init__(
        self,
        skeleton: Any,
        source: WeightSource,
        loader: WeightLoader,
        schemes: Schemes,
        *,
        keeps_float32: Sequence[str],
        rename: Rename,
    ) -> None:
        self._source, self._loader = source, loader
        self._store = MatrixStore(source, schemes)
        shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        stored_names = self._stored_names()
        self._names = _model_names(stored_names, shapes)
        loader.skip(*set(stored_names).difference(self._names.values()))
        head = skeleton.get_output_embeddings()
        tied = bool(getattr(skeleton.config, "tie_word_embeddings", False))
        #: path of an `nn.Linear` -> the stored matrix that is its weight
        self.direct: dict[str, str] = {}
        #: paths of layers that are never quantized on load: they choose among experts
        self.routers: set[str] = set()
        expert_counts = _expert_counts(skeleton.config)
        for path, module in skeleton.named_modules():
            if type(module) is not nn.Linear:
                continue
            if module.out_features in expert_counts:
                self.routers.add(path)
            stored = self._names.get(f"{path}.weight")
            is_kept = any(pattern in path for pattern in keeps_float32)
            is_plain = path in self.routers and stored and self._store.scheme_of(stored) is None
            if stored and not is_kept and not is_plain and not (tied and module is head):
                self.direct[path] = stored
        self._shapes = shapes
        #: the model's name of a stack of experts -> where they lie
        self.stacks = self._whole_stacks(
            find_stacks(dict(skeleton.named_modules()), self._names, rename)
        )

    def _whole_stacks(self, found: Mapping[str, Stack]) -> dict[str, Stack]:
        """Those of modules all of whose stacks were found: transformers loads the others."""
        paths = Counter(name.rpartition(".")[0] for name in found)
        return {name: one for name, one in found.items() if paths[name.rpartition(".")[0]] == 2}

    def _stored_names(self) -> list[str]:
        """Matrices and plain tensors; the parts of a quantized matrix count as one."""
        names = self._source.names()
        whole: dict[str, None] = {}
        parts: set[str] = set()
        for name in names:
            matrix = f"{name.rpartition('.')[0]}.weight"
            if self._store.scheme_of(matrix) is not None:
                whole[matrix] = None
                parts.update(self._store.names_of(matrix))
        whole.update(dict.fromkeys(name for name in names if name not in parts))
        return list(whole)

    def state(self, dtype: torch.dtype) -> dict[str, Any]:
        """What transformers is to load, by the names it knows: stored tensors, and stand-ins
        of `dtype` for what our loader brings."""
        nothing = torch.zeros((), dtype=dtype)
        direct = {f"{path}.weight" for path in self.direct}
        biases = {f"{path}.bias" for path in self.direct}
        found: dict[str, Any] = {name: nothing.expand(self._shapes[name]) for name in self.stacks}
        stacked = {name for stack in self.stacks.values() for name in stack.names}
        for name, stored in self._names.items():
            if stored in stacked:
                continue
            if name in direct or name in biases:
                found[name] = nothing.expand(self._shapes[name])
            else:
                found[name] = self._tensor(stored, self._shapes.get(name), dtype)
                self._loader.skip(stored)
        return found

    def _tensor(
        self, stored: str, shape: tuple[int, ...] | None, dtype: torch.dtype
    ) -> StoredParameter:
        scheme = self._store.scheme_of(stored)
        if scheme is None:
            tensor = self._source.get(stored)
            if tensor.encoding in DTYPES:
                return StoredParameter(lambda: self._copied(stored, typed(tensor).clone()))
            what = tensor.encoding
        else:
            # Formats of one number a weight keep its shape; others hold it in the model's own.
            names = self._source.names()
            shape = self._source.get(stored).shape if shape is None and stored in names else shape
            what = str(scheme)
        if shape is None or len(shape) != 2:
            raise UnsupportedBundle(
                f"tensor {stored}: {what} is read here only for linear layers and embeddings that "
                "transformers knows by the same name"
            )
        matrix = self._store.find(stored, (shape[0], shape[1]))

        def read() -> Tensor:
            weight = matrix.decode()
            is_grouped = isinstance(weight, GroupedWeight)
            return self._copied(
                stored, weight.dequantize(dtype) if is_grouped else weight.to(dtype)
            )

        return StoredParameter(read)

    def _copied(self, stored: str, value: Tensor) -> Tensor:
        self._store.release(stored)
        return value

    def linear(self, path: str, module: nn.Linear) -> Linear:
        """One of `direct`, with its bias where stored."""
        stored = self.direct[path].removesuffix(".weight")
        return self._loader.linear([stored], [module.out_features], module.in_features)

    def experts(self, path: str, module: Any) -> ExpertLayers | None:
        """Those of a module whose stacks are in `stacks`."""
        return load_experts(path, module, self.stacks, self._loader)

    def head(self, path: str, module: nn.Linear) -> Embedding:
        return self._loader.embedding(self.direct[path], module.out_features, module.in_features)


def _model_names(stored: Sequence[str], shapes: Mapping[str, object]) -> dict[str, str]:
    """Stored tensors by the model's names: that of a text model within a larger one has no
    `language_model` in it."""
    nested = any("language_model." in name for name in shapes)
    unused = [part for part in _OTHER_PARTS if not any(part in name for name in shapes)]
    names: dict[str, str] = {}
    for name in stored:
        own = name if nested or name in shapes else name.replace("language_model.", "", 1)
        if not any(part in name for part in unused):
            names[own] = name
    return names


def _expert_counts(config: Any) -> set[int]:
    """How many experts a layer may have: a layer of so many outputs is a router."""
    fields = vars(config.get_text_config()).items()
    return {value for name, value in fields if "experts" in name and type(value) is int}


def check_loaded(info: Mapping[str, Any]) -> None:
    """Raise for what transformers says does not fit, by name."""
    if mismatched := sorted(info["mismatched_keys"], key=str):
        name, got, wanted = mismatched[0]
        raise UnsupportedBundle(
            f"tensor {name} has shape {tuple(got)}, the config asks for {tuple(wanted)}"
        )
    for kind, error in (("missing", IncompleteBundle), ("unexpected", UnsupportedBundle)):
        names = sorted(info[f"{kind}_keys"])
        if names:
            shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
            raise error(f"{len(names)} {kind} tensors in the weights: {shown}")


def install(
    model: Any,
    weights: WeightMap,
    on_load: QuantizeOnLoad | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Put our layers in the place of the model's and the rest on the device; returns the bytes
    that our layers take."""
    taken = 0
    head_path, head = _head(model)
    for path, module in list(model.named_modules()):
        if is_experts(module):
            own = weights.experts(path, module)
            layers = give_experts(module, own) if own else take_apart(module, on_load, device)
            taken += layers.nbytes
        elif path in weights.direct and path != head_path:
            inner = weights.linear(path, module)
            taken += inner.nbytes
            _replace(model, path, RoutedLinear(inner, dtype))
        elif type(module) is nn.Linear and module is not head and module.weight.dtype == dtype:
            bias = module.bias.data.to(device, copy=True) if _has_bias(module) else None
            choice = None if path in weights.routers else on_load
            inner = fused_linear([own_weight(module.weight.data, choice, device)], [bias])
            taken += inner.nbytes
            _replace(model, path, RoutedLinear(inner, dtype))
    if head_path in weights.direct:
        embedding = weights.head(head_path, head)
        taken += embedding.nbytes
        _replace(model, head_path, RoutedHead(embedding, dtype))
    model.to(device)
    if head is not None and head_path not in weights.direct:
        # Tied to the embedding, or merged on its way: it shares what is on the device now.
        _replace(model, head_path, RoutedHead(DenseEmbedding(head.weight.data), dtype))
    return taken


def _head(model: Any) -> tuple[str, Any]:
    """Path and module of the head, if it is one that ours can stand in for."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or _has_bias(head):
        return "", None
    return next(path for path, module in model.named_modules() if module is head), head


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def freeze(model: nn.Module) -> int:
    """No parameter is trained here; returns the bytes of them and of the buffers."""
    tensors = {tensor.data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}
    model.requires_grad_(False)
    return sum(tensor.nbytes for tensor in tensors.values())
