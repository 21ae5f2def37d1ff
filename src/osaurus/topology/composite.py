"""A layer of several parts: attention beside a state space, a window with pools. And a layer
of none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from osaurus.topology.base import (
    AttentionTopology,
    Cut,
    LayerTopology,
    Rollback,
    StateArray,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositeTopology:
    """What the children remember, cut and rolled back as the strictest of them.

    Raises ValueError for two paged children (a layer has one block table) and for two arrays
    of one name.
    """

    children: tuple[LayerTopology, ...]
    kind: str = "composite"

    def __post_init__(self) -> None:
        if sum(child.paged is not None for child in self.children) > 1:
            raise ValueError(f"{self.kind}: a layer has at most one paged part")
        names = [array.name for array in self.arrays]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.kind}: array names {names} are not unique")

    @property
    def tag(self) -> str:
        return f"{self.kind}({';'.join(child.tag for child in self.children)})"

    @property
    def paged(self) -> AttentionTopology | None:
        return next((child.paged for child in self.children if child.paged is not None), None)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        return tuple(array for child in self.children for array in child.arrays)

    @property
    def cut(self) -> Cut:
        return "snapshot" if any(c.cut == "snapshot" for c in self.children) else "block"

    @property
    def rollback(self) -> Rollback:
        return "restore" if any(c.rollback == "restore" for c in self.children) else "forget"

    def nbytes(self, num_tokens: int, block_tokens: int, dtype: torch.dtype) -> int:
        return sum(child.nbytes(num_tokens, block_tokens, dtype) for child in self.children)


@dataclass(frozen=True, slots=True)
class NoMemory:
    """A layer that remembers nothing; it is counted, and never confused with a layer whose
    memory is missing."""

    @property
    def kind(self) -> str:
        return "none"

    @property
    def tag(self) -> str:
        return "none"

    @property
    def paged(self) -> AttentionTopology | None:
        return None

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        return ()

    @property
    def cut(self) -> Cut:
        return "block"

    @property
    def rollback(self) -> Rollback:
        return "forget"

    def nbytes(self, num_tokens: int, block_tokens: int, dtype: torch.dtype) -> int:
        return 0
