"""The compressed pool of DeepSeek-V4: one row for every complete run of tokens, beside a
local window of keys and values.

Each branch (compressor, indexer) folds `tokens_per_row` tokens into one row. Until a run is
complete its tokens wait in buffers, which is why the pool cannot be cut or rolled back freely:
a row cannot be taken apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osaurus.topology.base import AttentionTopology, StateArray
from osaurus.topology.composite import CompositeTopology
from osaurus.topology.recurrent import StateTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBranch:
    """One pool of a layer. With `overlaps` a row also reads the run before its own: tokens are
    projected to two halves, and the buffers carry the previous run from chunk to chunk."""

    name: str
    row_dim: int
    tokens_per_row: int
    overlaps: bool = False

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        parts = 2 if self.overlaps else 1
        waiting = (parts * self.tokens_per_row, parts * self.row_dim)
        return (
            StateArray(
                name=f"{self.name}_rows",
                shape=(self.row_dim,),
                tokens_per_row=self.tokens_per_row,
            ),
            StateArray(name=f"{self.name}_kv", shape=waiting),
            StateArray(name=f"{self.name}_gate", shape=waiting),
        )


def compressed_pool(window: AttentionTopology, branches: Sequence[PoolBranch]) -> CompositeTopology:
    """A layer of a local window and its pools."""
    arrays = tuple(array for branch in branches for array in branch.arrays)
    return CompositeTopology(
        kind="pool", children=(window, StateTopology(kind="pool", arrays=arrays))
    )
