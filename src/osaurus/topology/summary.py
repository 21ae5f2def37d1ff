"""What a whole model remembers, read off its layers' topologies and never off its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from osaurus.topology.base import LayerTopology
from osaurus.topology.composite import CompositeTopology


def observed(layers: Sequence[LayerTopology]) -> dict[str, int]:
    """Layers by kind: {"short_conv": 10, "full_attention": 6}. Sums to the layer count."""
    return dict(Counter(layer.kind for layer in layers))


def topology_tag(layers: Sequence[LayerTopology]) -> str:
    """Every layer's kind and geometry in order, runs counted: part of the cache's model key.

    Equal tags mean that one model's memory fits the other's arrays and blocks.
    """
    runs = ((tag, len(list(same))) for tag, same in groupby(layer.tag for layer in layers))
    return " ".join(tag if count == 1 else f"{count}*{tag}" for tag, count in runs)


def resumes_at_snapshots(layers: Sequence[LayerTopology]) -> bool:
    """Whether a prefix can be taken up only where a snapshot was kept."""
    return any(layer.cut == "snapshot" for layer in layers)


def is_hybrid(layers: Sequence[LayerTopology]) -> bool:
    """Whether some layer folds every token into state of fixed size. A compressed pool, whose
    rows stay apart, is no hybrid; a composite is one only through its children."""
    return any(
        leaf.arrays and all(array.tokens_per_row is None for array in leaf.arrays)
        for leaf in _leaves(layers)
    )


def has_pool(layers: Sequence[LayerTopology]) -> bool:
    """Whether some layer keeps rows that stand for runs of tokens."""
    return any(array.tokens_per_row is not None for layer in layers for array in layer.arrays)


def can_forget(layers: Sequence[LayerTopology]) -> bool:
    """Whether drafted tokens are undone by forgetting them: no layer needs a saved copy."""
    return all(layer.rollback == "forget" for layer in layers)


def _leaves(layers: Sequence[LayerTopology]) -> Iterator[LayerTopology]:
    for layer in layers:
        if isinstance(layer, CompositeTopology):
            yield from _leaves(layer.children)
        else:
            yield layer
