"""Multi-head latent attention: one compressed row a token that stands for keys and values.

DeepSeek-V2 (arXiv:2405.04434), section 2.1. The latent is not expanded before it is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

from osaurus.topology.base import AttentionTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentTopology(AttentionTopology):
    """One kv head whose row is [latent | rotary part | what else a model keeps a token].

    The first `latent_dim` of the `k_dim` numbers are the values too, so `v_dim` is 0 unless the
    model keeps more a token (an indexer's key, say). Never coded by default: the latent is
    compressed already, and errors grow in the up-projection.
    """

    latent_dim: int

    def __post_init__(self) -> None:
        if self.num_kv_heads != 1 or not 0 < self.latent_dim <= self.k_dim:
            raise ValueError("latent attention has one kv head and a latent within its key")

    @property
    def kind(self) -> str:
        return "mla"

    @property
    def tag(self) -> str:
        window = "" if self.window is None else f",w{self.window}"
        return f"mla({self.latent_dim}/{self.k_dim}+{self.v_dim}{window})"
