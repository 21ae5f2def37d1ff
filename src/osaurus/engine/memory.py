"""How much memory the KV pool may take, and how long a context fits it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from osaurus.cache.blocks import BlockPool
from osaurus.errors import ContextLengthExceeded, InsufficientResources
from osaurus.kernels.heap import keep_heap_pages as keep_heap_pages
from osaurus.kernels.heap import trim_heap as trim_heap
from osaurus.topology.base import KVGroup

#: Share of the memory available at load that the KV pool may grow to.
KV_MEMORY_SHARE = 0.25


def default_kv_budget(
    groups: Sequence[KVGroup],
    block_tokens: int,
    dtype: torch.dtype,
    max_context_tokens: int,
    max_batch_size: int,
    device: torch.device,
    *,
    state_bytes: int = 0,
) -> int:
    """Bytes: a quarter of the memory available on the device, or less when a full batch of
    full contexts, and `state_bytes` beside it, need less."""
    blocks = -(-max_context_tokens // block_tokens) + 1
    most = blocks * max_batch_size * sum(g.block_bytes(block_tokens, dtype) for g in groups)
    return min(most + state_bytes, int(available_bytes(device) * KV_MEMORY_SHARE))


def available_bytes(device: torch.device) -> int:
    """Memory this process may still take: the device's own, or the host's within the limit
    of the cgroup it runs in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def physical_bytes(device: torch.device) -> int:
    """All the memory there is: the device's own, or the host's within the cgroup's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total


def longest_context(pool: BlockPool, limit: int, chunk_tokens: int) -> int:
    """The most tokens, up to `limit`, that one request alone can keep in the pool."""

    def fits(tokens: int) -> bool:
        return pool.can_allocate(
            blocks_of_one(pool.groups, tokens, pool.block_tokens, chunk_tokens)
        )

    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if low < 2:
        raise InsufficientResources(
            f"the KV budget of {pool.budget_bytes} bytes holds no request; raise kv_budget_bytes"
        )
    return low


def context_exceeded(prompt_tokens: int, context_tokens: int) -> ContextLengthExceeded:
    """A prompt that fills the context to the last token leaves no room for an answer."""
    limit = context_tokens if prompt_tokens > context_tokens else context_tokens - 1
    return ContextLengthExceeded(prompt_tokens, limit)


def memory_exceeded(
    pool: BlockPool, num_tokens: int, held_tokens: int, chunk_tokens: int
) -> InsufficientResources:
    """For a sequence that the model could read and the pool, which holds `held_tokens`, cannot
    keep, however empty it is."""
    counts = blocks_of_one(pool.groups, num_tokens, pool.block_tokens, chunk_tokens)
    needed = sum(count * size for count, size in zip(counts, pool.block_bytes, strict=True))
    return InsufficientResources(
        f"{num_tokens} tokens need {needed / 1e6:.1f} MB of keys and values, and the "
        f"{pool.budget_bytes / 1e6:.1f} MB that this model may have for them hold {held_tokens}; "
        "shorten the messages or raise performance.kvBudgetMB"
    )


def blocks_of_one(
    groups: Sequence[KVGroup], num_tokens: int, block_tokens: int, chunk_tokens: int
) -> list[int]:
    """Blocks of each group that a request of that length holds at most."""
    counts: list[int] = []
    for group in groups:
        blocks = -(-num_tokens // block_tokens)
        window = group.topology.window
        if window is not None:
            blocks = min(blocks, -(-(window + chunk_tokens) // block_tokens) + 1)
        counts.append(blocks)
    return counts
