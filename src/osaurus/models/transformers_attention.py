"""Attention of a transformers model over our blocks, and what each of its layers remembers.

transformers calls one registered function for every attention of every layer. A *probe* of one
token through it learns what is asked for: heads, dims, scale, window, cap, sinks, and which
layers read another's keys. In a *step* the same calls, in the same order, write their rows'
keys and values into our blocks and attend through our kernels.

Letters: B batch, T tokens of it, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from osaurus.errors import UnsupportedBundle
from osaurus.kernels.coded_attention import coded_attention
from osaurus.kernels.paged_attention import QUERY_TILE, decode_attention, prefill_attention
from osaurus.kernels.shaped_attention import shaped_prefill_attention
from osaurus.models.base import GroupBatch, LayerMemory

#: A position far beyond every window: what its row may read tells the kind of a mask.
_FAR = 1 << 24
#: Tensors among the keywords of a call that this attention serves, or that change nothing in it.
_SERVED = frozenset(["s_aux", "position_ids", "cache_position"])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One attention of the model. `shared` is the earlier call whose keys it reads."""

    layer: int | None  # the module's own number, where it has one
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    shared: int | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and not self.sinks


@dataclass(slots=True)
class Probe:
    """Collects the calls of one forward of one token."""

    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[int | None] = field(default_factory=list)  # windows of the masks made
    keys: list[Tensor] = field(default_factory=list)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """One token attends to itself: its answer is its value, but for sinks."""
        if k.shape[2] != q.shape[2] or k.shape[0] != q.shape[0]:
            raise UnsupportedBundle("attention over other rows than its own is not supported")
        if not kwargs.get("is_causal", True) or not getattr(module, "is_causal", True):
            raise UnsupportedBundle("attention that is not causal is not supported")
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and name not in _SERVED:
                raise UnsupportedBundle(f"attention with {name} is not supported")
        window = self._window(mask, kwargs.get("sliding_window"))
        softcap = kwargs.get("softcap")
        scaling = kwargs.get("scaling")
        layer = getattr(module, "layer_idx", None)
        # Layers that share keys pass on the very tensor.
        shared = next((i for i, seen in enumerate(self.keys) if seen is k), None)
        self.keys.append(k)
        self.calls.append(
            AttentionCall(
                layer=layer if isinstance(layer, int) else None,
                heads=q.shape[1],
                kv_heads=k.shape[1],
                k_dim=k.shape[3],
                v_dim=v.shape[3],
                scale=float(scaling) if scaling is not None else k.shape[3] ** -0.5,
                window=window,
                softcap=float(softcap) if softcap else None,
                sinks=kwargs.get("s_aux") is not None,
                shared=shared,
            )
        )
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2).contiguous()

    def make_mask(self, mask_function: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        """A stand-in [1, 1, 1, 1] that says which of the masks made so far it is."""
        self.masks.append(_window_of(mask_function))
        return torch.full((1, 1, 1, 1), float(len(self.masks)), dtype=torch.float32)

    def _window(self, mask: Any, keyword: Any) -> int | None:
        """The mask decides; without one, the keyword that fused kernels follow."""
        if mask is None:
            return int(keyword) if keyword else None
        if not isinstance(mask, Tensor) or mask.numel() != 1 or mask.dtype != torch.float32:
            raise UnsupportedBundle("attention with a mask of its own is not supported")
        index = int(mask) - 1
        if float(mask) != index + 1 or not 0 <= index < len(self.masks):
            raise UnsupportedBundle("attention with a mask of its own is not supported")
        return self.masks[index]


def _window_of(mask_function: Callable[..., Any]) -> int | None:
    """How far back a mask lets a row read: W positions, its own included; None for all."""

    def reads(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    if reads(_FAR, _FAR + 1) or not reads(_FAR, _FAR):
        raise UnsupportedBundle("attention whose mask is not causal is not supported")
    if reads(_FAR, 0):
        return None
    found: list[int] = []
    for query in (_FAR, _FAR + 1):
        low, high = 0, query  # low is hidden, high is read
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reads(query, middle) else (middle, high)
        found.append(query - low)
    if found[0] != found[1]:
        raise UnsupportedBundle("attention in chunks is not supported")
    return found[0]


@dataclass(slots=True)
class Step:
    """One forward of the network: the calls it will make, in order, and their memory.

    `memory[i]` is where call i's keys lie; `groups` are the parts of the batch that its rows
    make up. Its rows are all decode rows or all prefill rows.
    """

    calls: Sequence[AttentionCall]
    memory: Sequence[LayerMemory]
    groups: Sequence[GroupBatch]
    is_decode: bool
    done: int = 0

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """q: [B, H, T, Dk], k and v: [B, K, T, D]; returns [B, T, H, Dv]. Rows are b * T + t."""
        call, memory = self.calls[self.done], self.memory[self.done]
        self.done += 1
        batch, heads, tokens, _ = q.shape
        if call.layer is not None and getattr(module, "layer_idx", None) != call.layer:
            raise RuntimeError(f"attention of layer {call.layer} was expected")
        if call.shared is None:
            rows = torch.cat([k, v], dim=-1).transpose(1, 2).flatten(0, 1)
            store_rows(rows, self.groups[memory.group], memory)
        sinks = kwargs["s_aux"].float() if call.sinks else None
        queries = q.transpose(1, 2).reshape(batch * tokens, heads, call.k_dim).float() * call.scale
        out = attend(queries, self.groups[memory.group], memory, call, sinks)
        return out.to(q.dtype).reshape(batch, tokens, heads, call.v_dim).contiguous()


def store_rows(rows: Tensor, group: GroupBatch, memory: LayerMemory) -> None:
    """Put [rows, K, Dk + Dv] into their slots."""
    flat = memory.storage.view(-1, memory.storage.shape[-1])
    flat.index_copy_(0, group.write_rows, rows.to(flat.dtype).reshape(-1, flat.shape[1]))


def attend(
    q: Tensor, group: GroupBatch, memory: LayerMemory, call: AttentionCall, sinks: Tensor | None
) -> Tensor:
    """q: [rows, H, Dk] float32, scaled; returns [rows, H, Dv]."""
    storage, dim = memory.storage, call.k_dim
    if group.decode is not None:
        return decode_attention(q, storage, group.decode, dim, softcap=call.softcap, sinks=sinks)
    if group.coded is not None and memory.coded is not None and call.is_plain:
        return coded_attention(q, storage, memory.coded, group.coded, dim)
    if group.prefill is None:
        raise ValueError("a group batch carries a plan that its layers can follow")
    if call.is_plain:
        return prefill_attention(q.to(storage.dtype), storage, group.prefill, dim)
    return shaped_prefill_attention(
        q, storage, group.prefill, dim, softcap=call.softcap, sinks=sinks
    )


_current: ContextVar[Step | Probe | None] = ContextVar("osaurus_step", default=None)


@contextmanager
def during(step: Step | Probe) -> Generator[None]:
    """Have the functions below serve one forward."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def num_small_rows(rows: int) -> int:
    """How many of `rows` rows are decode rows in the present forward: all or none."""
    step = _current.get()
    return rows if step is None or isinstance(step, Probe) or step.is_decode else 0


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls (its `AttentionInterface`)."""
    step = _current.get()
    if isinstance(step, Step):
        return step.attend(module, query, key, value, kwargs), None
    if isinstance(step, Probe):
        return step.attend(module, query, key, value, attention_mask, kwargs), None
    raise RuntimeError("this attention function runs within a step of the engine only")


def mask_function(**kwargs: Any) -> Tensor | None:
    """What transformers makes masks with (its `AttentionMaskInterface`) while it is probed."""
    step = _current.get()
    if not isinstance(step, Probe):
        return None
    return step.make_mask(kwargs["mask_function"], torch.float32)


def select_rows(group: GroupBatch, rows: Tensor, num_rows: int) -> GroupBatch:
    """The part of a decode group that some of its rows make up, in ascending order.

    rows: [n] int64 of `num_rows`.
    """
    plan = group.decode
    if plan is None:
        raise ValueError("only decode rows are taken apart")
    place = torch.full((num_rows,), -1, device=rows.device)
    place[rows] = torch.arange(rows.numel(), device=rows.device)
    new_row = place[plan.pair_row]
    pairs = (new_row >= 0).nonzero().squeeze(1)
    return GroupBatch(
        write_rows=group.write_rows.view(num_rows, -1)[rows].flatten(),
        decode=replace(
            plan,
            pair_block=plan.pair_block[pairs],
            pair_row=new_row[pairs],
            row_pairs=plan.row_pairs[rows],
            hidden=plan.hidden[pairs],
        ),
    )


def select_prefill_row(group: GroupBatch, row: int, num_rows: int) -> GroupBatch:
    """The part of a prefill group that one of its rows is. Keys of the rows after it are not
    there yet; the mask hides them."""
    plan = group.prefill
    if plan is None:
        raise ValueError("only prefill rows are taken apart")
    mask = plan.mask[row].expand(QUERY_TILE, -1)
    return GroupBatch(
        write_rows=group.write_rows.view(num_rows, -1)[row],
        prefill=replace(plan, num_rows=1, mask=mask),
    )
