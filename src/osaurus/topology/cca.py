"""Compressed convolutional attention (ZAYA): attention whose keys and queries pass a
convolution and whose values mix in the previous hidden state. One layer holds both halves."""

from __future__ import annotations

from osaurus.topology.base import AttentionTopology, StateArray
from osaurus.topology.composite import CompositeTopology
from osaurus.topology.recurrent import StateTopology


def convolutional_attention(
    attention: AttentionTopology, channels: int, taps: int, hidden_size: int
) -> CompositeTopology:
    """The window of `channels` convolved, taps - 1 inputs deep, and the last token's hidden
    state ([1280, 2] and [2048] in ZAYA1-8B)."""
    arrays = (
        StateArray(name="conv", shape=(channels, taps - 1)),
        StateArray(name="prev_hidden", shape=(hidden_size,)),
    )
    return CompositeTopology(
        kind="cca", children=(attention, StateTopology(kind="cca", arrays=arrays))
    )
