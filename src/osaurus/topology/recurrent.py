"""State that every token folds itself into: convolution windows and matrices of fixed size.

It cannot be cut between snapshots and cannot forget a token. Layers differ in how many arrays
they keep; the constructors below are the usual ones. Convolution windows hold the last inputs
before the activation, oldest first, zeros where there were none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from osaurus.topology.base import AttentionTopology, Cut, Rollback, StateArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTopology:
    """Named float32 arrays, as many as the layer declares; raises ValueError for none."""

    kind: str
    arrays: tuple[StateArray, ...]

    def __post_init__(self) -> None:
        if not self.arrays or len({array.name for array in self.arrays}) < len(self.arrays):
            raise ValueError(f"{self.kind}: state needs at least one array, each with its own name")

    @property
    def tag(self) -> str:
        return f"{self.kind}({','.join(array.tag for array in self.arrays)})"

    @property
    def paged(self) -> AttentionTopology | None:
        return None

    @property
    def cut(self) -> Cut:
        return "snapshot"

    @property
    def rollback(self) -> Rollback:
        return "restore"

    def nbytes(self, num_tokens: int, block_tokens: int, dtype: torch.dtype) -> int:
        return sum(array.nbytes(num_tokens) for array in self.arrays)


def short_conv(channels: int, taps: int) -> StateTopology:
    """A gated short convolution (LFM2): one window and nothing else."""
    return StateTopology(kind="short_conv", arrays=(_window(channels, taps),))


def gated_delta(
    channels: int,
    taps: int,
    value_heads: int,
    k_dim: int,
    v_dim: int,
    waiting: tuple[int, int] | None = None,
) -> StateTopology:
    """A gated delta network (arXiv:2412.06464): the convolution's window over `channels` and
    one [k_dim, v_dim] matrix a value head; with `waiting`, the shape of the tokens that the
    matrix has not absorbed yet, and their number."""
    matrix = StateArray(name="state", shape=(value_heads, k_dim, v_dim))
    arrays = (_window(channels, taps), matrix)
    if waiting is not None:
        arrays += (
            StateArray(name="waiting", shape=waiting),
            StateArray(name="num_waiting", shape=(1,)),
        )
    return StateTopology(kind="gated_delta", arrays=arrays)


def ssm(channels: int, taps: int, heads: int, head_dim: int, state_dim: int) -> StateTopology:
    """A state space layer (Mamba-2, arXiv:2405.21060): window and [head_dim, state_dim] a head.
    Mamba-1 is `heads` 1 with its inner width as `head_dim`."""
    matrix = StateArray(name="state", shape=(heads, head_dim, state_dim))
    return StateTopology(kind="ssm", arrays=(_window(channels, taps), matrix))


def linear_attention(heads: int, k_dim: int, v_dim: int) -> StateTopology:
    """Linear attention with decay: one [k_dim, v_dim] matrix a head."""
    matrix = StateArray(name="state", shape=(heads, k_dim, v_dim))
    return StateTopology(kind="linear_attention", arrays=(matrix,))


def _window(channels: int, taps: int) -> StateArray:
    return StateArray(name="conv", shape=(channels, taps - 1))
