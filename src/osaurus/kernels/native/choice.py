"""Tokens of rows of logits, natively: the largest, what top-k, top-p and min-p leave, the keyed
draw. The torch forms are in engine/sampler.py and kernels/sample.py.

A full vocabulary is read three times at most and never sorted. Draws look for tokens whose score
and noise can be the largest; where two are nearer than a logarithm's last digits, both are given
back, and the caller computes the noise of these alone.

Letters: L rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from osaurus.kernels.native.library import library, native

#: Tokens of one draw that the caller may have to choose from.
_CONTENDERS = 8


class _AskStruct(ctypes.Structure):
    """`Ask` of choice.h."""

    _fields_ = (
        ("row", ctypes.c_void_p),
        ("vocab", ctypes.c_int64),
        ("key", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("draws", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("ids", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("log_total", ctypes.c_double),
        ("count", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Filters:
    """Settings of a draw, spelled as those of requests are: 0 or 1 is off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def can_choose(logits: Tensor) -> bool:
    """Whether the library is here and reads such logits."""
    return (
        native().library is not None
        and logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and logits.is_contiguous()
        and logits.numel() > 0
    )


def largest(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Of each row of [L, V] the place of the largest, the lowest among equals and -1 where there
    is no number, and whether the row is finite."""
    places = torch.empty(logits.shape[0], dtype=torch.int64)
    finite = torch.empty(logits.shape[0], dtype=torch.bool)
    failed = library().osaurus_largest(
        logits.data_ptr(),
        logits.shape[0],
        logits.shape[1],
        places.data_ptr(),
        finite.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory to look through {logits.shape[0]} rows of logits")
    return places.tolist(), finite.tolist()


def draw(
    rows: Sequence[Tensor], filters: Sequence[Filters], keys: Sequence[int]
) -> list[list[int]]:
    """For each row [V] the tokens among which the keyed draw chooses: almost always one, none
    where the row leaves nothing to choose. keys: as of `kernels.sample.noise_key`."""
    asks = (_AskStruct * len(rows))()
    ids = (ctypes.c_int32 * (_CONTENDERS * len(rows)))()
    at = ctypes.addressof(ids)
    for i, (row, wanted, key) in enumerate(zip(rows, filters, keys, strict=True)):
        _fill(asks[i], row, wanted)
        asks[i].key, asks[i].draws = key, 1
        asks[i].capacity, asks[i].ids = _CONTENDERS, at + 4 * _CONTENDERS * i
    _run(asks, len(rows))
    return [
        list(ids[_CONTENDERS * i : _CONTENDERS * i + max(0, asks[i].count)])
        for i in range(len(rows))
    ]


def candidates(row: Tensor, filters: Filters) -> tuple[Tensor, Tensor, float] | None:
    """What the filters leave of row [V]: scores after temperature and ids, the best first and the
    lower id first among equals, and the logarithm of the sum of exponentials of all scores. None
    where the row has no finite best."""
    vocab = row.numel()
    room = filters.top_k if 0 < filters.top_k < vocab else vocab
    ids = torch.empty(room, dtype=torch.int32)
    scores = torch.empty(room)
    asks = (_AskStruct * 1)()
    ask = asks[0]
    _fill(ask, row, filters)
    ask.capacity, ask.ids, ask.scores = room, ids.data_ptr(), scores.data_ptr()
    _run(asks, 1)
    if ask.count < 0:
        return None
    return scores[: ask.count], ids[: ask.count].long(), ask.log_total


def _fill(ask: _AskStruct, row: Tensor, filters: Filters) -> None:
    ask.row, ask.vocab = row.data_ptr(), row.numel()
    ask.temperature, ask.top_k = filters.temperature, max(0, filters.top_k)
    ask.top_p = filters.top_p if 0 < filters.top_p < 1 else 0.0
    ask.min_p = math.log(filters.min_p) if filters.min_p > 0 else -math.inf


def _run(asks: ctypes.Array[_AskStruct], count: int) -> None:
    if library().osaurus_choose(ctypes.addressof(asks), count, torch.get_num_threads()):
        raise MemoryError(f"no memory to draw from {count} rows of logits")
