"""From a KV mode to the codec of one KV group, or the reason why there is none."""

from __future__ import annotations

import torch

from osaurus.topology.base import AttentionTopology
from osaurus.topology.codecs import affine, turboquant
from osaurus.topology.codecs.base import KVCodec
from osaurus.types.cache import KVMode


def why_exact(mode: KVMode, topology: AttentionTopology) -> str:
    """Why a group's blocks stay exact under a mode; empty when they may be coded.

    Window layers are bounded already, and the sinks and the tail are most of them.
    `engine_selected` must have been resolved: what it means depends on the model.
    """
    if mode.kind in ("none", "engine_selected"):
        return f"the KV mode is {mode}"
    if topology.window is not None:
        return "sliding-window layers keep exact KV"
    if topology.kind == "mla":
        return "latent layers are compressed already"
    dims = {topology.k_dim, topology.v_dim}
    if mode.kind == "turbo" and not all(map(turboquant.is_eligible_dim, dims)):
        return f"{mode} needs longer vectors than head dims {sorted(dims)}"
    if mode.kind == "affine" and not all(affine.is_eligible_dim(d, mode.second) for d in dims):
        return f"{mode} needs head dims that are multiples of {mode.second}, not {sorted(dims)}"
    return ""


def make_codec(
    mode: KVMode,
    topology: AttentionTopology,
    block_tokens: int,
    device: torch.device | str = "cpu",
) -> KVCodec:
    """Raises ValueError with `why_exact`'s reason where blocks of this group stay exact."""
    reason = why_exact(mode, topology)
    if reason:
        raise ValueError(reason)
    if mode.kind == "turbo":
        return turboquant.TurboQuantCodec(
            mode.first,
            mode.second,
            k_dim=topology.k_dim,
            v_dim=topology.v_dim,
            block_tokens=block_tokens,
            device=device,
        )
    return affine.AffineCodec(
        mode.first,
        mode.second,
        k_dim=topology.k_dim,
        v_dim=topology.v_dim,
        block_tokens=block_tokens,
        device=device,
    )
