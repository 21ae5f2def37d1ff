"""Builds the cache of one engine: its key from the model, its disk tier from the settings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import psutil

from osaurus.cache.blocks import BlockPool
from osaurus.cache.coordinator import CacheCoordinator
from osaurus.cache.key import ModelKey
from osaurus.cache.state_tier import StateTier
from osaurus.models.base import Model
from osaurus.settings.profiles import PROFILES
from osaurus.topology.summary import observed, topology_tag
from osaurus.types.cache import CacheConfig, KVMode

if TYPE_CHECKING:
    from osaurus.cache.disk import DiskStore

logger = logging.getLogger(__name__)


def open_cache(
    model: Model,
    pool: BlockPool,
    states: StateTier,
    config: CacheConfig,
    identity: str | None,
    kv_mode: KVMode,
) -> CacheCoordinator:
    """The coordinator of a model's memory, with a disk tier where the settings name a directory
    that can be written. A directory that cannot is a reason in the stats, never an error."""
    layers = model.layers_topology
    key = ModelKey(
        identity=identity or "anonymous",
        dtype=str(model.kv_dtype).removeprefix("torch."),
        topology=topology_tag(layers),
        block_tokens=pool.block_tokens,
    )
    pool.cached_limit_bytes = min(pool.budget_bytes, _prefix_limit(config))
    disk, why = _open_disk(config, identity)
    return CacheCoordinator(
        pool,
        states,
        key,
        config,
        kv_mode=kv_mode,
        disk=disk,
        disk_off=why,
        topology=observed(layers),
    )


def _prefix_limit(config: CacheConfig) -> int:
    """Bytes that prefixes which nobody uses may fill."""
    if config.prefix_max_bytes is not None:
        return config.prefix_max_bytes
    share = PROFILES[config.memory_profile].prefix_share
    if config.prefix_percent is not None:
        share = config.prefix_percent / 100
    return int(share * psutil.virtual_memory().total)


def _open_disk(config: CacheConfig, identity: str | None) -> tuple[DiskStore | None, str]:
    if config.disk_dir is None:
        return None, "switched off"
    if identity is None:
        return None, "the model has no identity that would tell its records from others'"
    from osaurus.cache.disk import open_store

    opened = open_store(
        config.disk_dir, max_percent=config.disk_max_percent, max_gb=config.disk_max_gb
    )
    if isinstance(opened, str):
        logger.warning("no KV cache on disk: %s", opened)
        return None, opened
    return opened, ""
