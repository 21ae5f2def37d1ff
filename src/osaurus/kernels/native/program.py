"""A model's forward as one native call: a list of operations on row buffers.

`ProgramBuilder` writes the list, `Program` runs it over a step's rows. Tensors whose addresses a
program holds are kept alive by it. What each operation does and takes is said in abi.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from osaurus.kernels.native.library import library
from osaurus.kernels.native.matrix import LANES, NativeMatrix

(EMBED, NORM, NORM_ADD, LINEAR, ROPE, ATTEND, JOIN, GATE, ROUND, COPY) = range(10)
GATED = 12
_FLOATS, _INPUTS = 0, 1
#: Queries of one kv head, and numbers of one head, that the attention takes.
MAX_QUERIES_PER_KV, MAX_HEAD_DIM = 64, 512

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}


class _Op(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("source", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("beside", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("i", ctypes.c_int32 * 8),
        ("f", ctypes.c_float * 4),
        ("p", ctypes.c_void_p * 4),
    )


class _Shape(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("width", ctypes.c_int32))


class _Group(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p),
        ("table_start", ctypes.c_void_p),
        ("first_block", ctypes.c_void_p),
    )


class _Args(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int32),
        ("spans", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("logits_rows", ctypes.c_int32),
        ("block_tokens", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("embeds", ctypes.c_void_p),
        ("span", ctypes.c_void_p),
        ("group", ctypes.c_void_p),
        ("logits_row", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("taps", ctypes.c_void_p),
        ("storage", ctypes.c_void_p),
        ("rotary", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One layer's attention. `window` None is full; `group` counts KV groups, `storage` layers
    with keys and values, `rotary` the model's rotary tables."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    group: int
    storage: int
    rotary: int
    rotary_dims: int

    @property
    def is_supported(self) -> bool:
        dims = (self.k_dim, self.v_dim)
        return (
            all(dim % LANES == 0 and 0 < dim <= MAX_HEAD_DIM for dim in dims)
            and self.heads % self.kv_heads == 0
            and self.heads // self.kv_heads <= MAX_QUERIES_PER_KV
            and self.rotary_dims % 2 == 0
            and self.rotary_dims <= self.k_dim
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One forward's rows (see `models.base.ForwardBatch`, whose fields these are)."""

    token_ids: Tensor  # [T] int64
    q_start: Sequence[int]
    kv_len: Sequence[int]
    block_table: Sequence[Sequence[Sequence[int]]]  # per group, per slot
    first_block: Sequence[Sequence[int]]  # per group, per slot
    logits_rows: Tensor  # [L] int64
    embeds: Tensor | None = None  # [T, C] float32


class Program:
    """Made by `ProgramBuilder.build`. Not for two threads at once."""

    def __init__(
        self, ops: Sequence[_Op], shapes: Sequence[_Shape], kept: Sequence[object]
    ) -> None:
        self._library = library()
        self._kept = tuple(kept)
        self._handle = self._library.osaurus_program(
            (_Op * len(ops))(*ops), len(ops), (_Shape * len(shapes))(*shapes), len(shapes)
        )

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self._library.osaurus_free(handle)

    def run(
        self,
        rows: StepRows,
        *,
        num_ops: int,
        block_tokens: int,
        storage: Sequence[int],
        rotary: Sequence[Tensor],
        taps: Sequence[Tensor] = (),
        vocab_size: int = 0,
    ) -> Tensor | None:
        """Run the first `num_ops` operations. `storage` are the layers' addresses, `taps` are
        filled. Returns logits [L, vocab_size] float32, None for `vocab_size` 0."""
        starts, lengths = np.asarray(rows.q_start, np.int32), np.asarray(rows.kv_len, np.int32)
        spans = np.zeros((len(lengths), 4), np.int32)
        spans[:, 0] = starts[:-1]
        spans[:, 1] = starts[1:] - starts[:-1]
        spans[:, 2] = lengths - spans[:, 1]
        count = int(starts[-1])
        positions = np.repeat(spans[:, 2] - spans[:, 0], spans[:, 1]) + np.arange(count)
        positions = positions.astype(np.int32)
        kept: list[np.ndarray] = []
        groups = (_Group * len(rows.block_table))()
        for group, tables, firsts in zip(groups, rows.block_table, rows.first_block, strict=True):
            table = np.asarray([block for blocks in tables for block in blocks], np.int32)
            ends = np.cumsum([0] + [len(blocks) for blocks in tables], dtype=np.int32)
            first = np.asarray(firsts, np.int32)
            kept += [table, ends, first]
            group.table, group.table_start, group.first_block = (
                array.ctypes.data for array in (table, ends, first)
            )
        embeds = None if rows.embeds is None else rows.embeds.float().contiguous()
        num_logits = rows.logits_rows.numel() if vocab_size else 0
        logits = torch.empty(num_logits, vocab_size) if vocab_size else None
        pointers = [
            _pointers(values)
            for values in (
                [tap.data_ptr() for tap in taps],
                storage,
                [table.data_ptr() for table in rotary],
            )
        ]
        args = _Args(
            rows=count,
            spans=len(lengths),
            groups=len(groups),
            logits_rows=num_logits,
            block_tokens=block_tokens,
            token_ids=rows.token_ids.data_ptr(),
            positions=positions.ctypes.data,
            embeds=None if embeds is None else embeds.data_ptr(),
            span=spans.ctypes.data,
            group=ctypes.addressof(groups),
            logits_row=rows.logits_rows.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
            taps=ctypes.addressof(pointers[0]),
            storage=ctypes.addressof(pointers[1]),
            rotary=ctypes.addressof(pointers[2]),
        )
        threads = torch.get_num_threads()
        if self._library.osaurus_run(self._handle, ctypes.addressof(args), num_ops, threads):
            raise MemoryError(f"no memory for a forward of {count} rows")
        return logits


def _pointers(values: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(1, len(values)))(*values)


class ProgramBuilder:
    """Writes operations in order. Buffers are numbers; products read INPUTS, the rest FLOATS."""

    def __init__(self) -> None:
        self._ops: list[_Op] = []
        self._shapes: list[_Shape] = []
        self._kept: list[object] = []
        self._plans: dict[tuple[int | None, int], int] = {}

    @property
    def num_ops(self) -> int:
        return len(self._ops)

    def floats(self, width: int) -> int:
        self._shapes.append(_Shape(_FLOATS, width))
        return len(self._shapes) - 1

    def inputs(self, width: int) -> int:
        self._shapes.append(_Shape(_INPUTS, width))
        return len(self._shapes) - 1

    def build(self) -> Program:
        return Program(self._ops, self._shapes, self._kept)

    def _add(
        self,
        kind: int,
        source: int,
        target: int,
        *,
        rows: int = 0,
        beside: bool = False,
        i: Sequence[int] = (),
        f: Sequence[float] = (),
        p: Sequence[Tensor | NativeMatrix | None] = (),
    ) -> None:
        op = _Op(kind=kind, source=source, target=target, rows=rows, beside=int(beside))
        op.i[: len(i)] = list(i)
        op.f[: len(f)] = list(f)
        for place, value in enumerate(p):
            if isinstance(value, NativeMatrix):
                self._kept.append(value)
                op.p[place] = value.address
            elif value is not None:
                kept = value.float().contiguous()
                self._kept.append(kept)
                op.p[place] = kept.data_ptr()
        self._ops.append(op)

    def embed(self, matrix: NativeMatrix, target: int, factor: float) -> None:
        self._add(EMBED, -1, target, f=[factor], p=[matrix])

    def norm(
        self, source: int, target: int, weight: Tensor, eps: float, *, logits_rows: bool = False
    ) -> None:
        self._add(NORM, source, target, rows=int(logits_rows), f=[eps], p=[weight])

    def norm_add(self, source: int, target: int, weight: Tensor, eps: float) -> None:
        self._add(NORM_ADD, source, target, f=[eps], p=[weight])

    def linear(
        self, source: int, target: int, matrices: Sequence[NativeMatrix], *, add: bool = False
    ) -> None:
        """Projections of one input, their outputs side by side."""
        column = 0
        for matrix in matrices:
            i = [column, 0, int(add)]
            self._add(LINEAR, source, target, beside=column > 0, i=i, p=[matrix])
            column += matrix.n

    def head(self, source: int, matrix: NativeMatrix) -> None:
        self._add(LINEAR, source, -1, rows=1, i=[0, matrix.n, 0], p=[matrix])

    def rope(
        self,
        source: int,
        target: int,
        shape: AttentionShape,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
    ) -> None:
        i = [shape.heads, shape.kv_heads, shape.k_dim, shape.v_dim, shape.rotary_dims]
        i += [shape.rotary, shape.storage, shape.group]
        self._add(ROPE, source, target, i=i, f=[eps, scale], p=[q_norm, k_norm])

    def attend(
        self,
        source: int,
        target: int,
        shape: AttentionShape,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attention of the rotated queries in `source` to the input `target`."""
        plan = self._plans.setdefault(
            (shape.window, shape.heads // shape.kv_heads), len(self._plans)
        )
        i = [shape.heads, shape.kv_heads, shape.k_dim, shape.v_dim, shape.window or 0]
        i += [plan, shape.storage, shape.group]
        self._add(ATTEND, source, -1, i=i, f=[softcap or 0.0])
        self._add(JOIN, -1, target, i=i, p=[sinks])

    def gate(self, source: int, target: int, activation: Activation) -> None:
        self._add(GATE, source, target, i=[_ACTIVATIONS[activation]])

    def gated(
        self,
        source: int,
        target: int,
        gate_up: Sequence[NativeMatrix],
        activation: Activation,
        *,
        for_group: int,
    ) -> bool:
        """`linear` and `gate` in one, for `for_group`, the group of the product that reads the
        result. False, and nothing written, where the matrices cannot be taken so."""
        gate, up = gate_up[0], gate_up[-1]
        is_one = len(gate_up) == 1
        width = gate.n // 2 if is_one else gate.n
        if width % (2 * LANES) or len(gate_up) > 2 or not (is_one or gate.is_like(up)):
            return False
        i = [_ACTIVATIONS[activation], for_group, width if is_one else 0, width]
        self._add(GATED, source, target, i=i, p=[gate, up])
        return True

    def round(self, source: int, target: int) -> None:
        self._add(ROUND, source, target)

    def copy(self, source: int, tap: int) -> None:
        self._add(COPY, source, -1, i=[tap])
