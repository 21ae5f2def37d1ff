"""Compresses the middle of a request's keys and values while it decodes.

A row at position p of an answer reads `codable_blocks(p)` coded and all else exact, alone, in
any batch and after a preemption: what it reads depends on its own position only. Blocks are
coded between steps, a few at a time, and the request waits for them.
"""

from __future__ import annotations

from osaurus.cache.blocks import BlockPool
from osaurus.cache.coordinator import CacheCoordinator
from osaurus.engine.request import Request
from osaurus.topology.codecs.base import codable_blocks, rows_until_coding

#: Blocks coded of one request between two steps: some milliseconds.
BLOCKS_A_STEP = 8


class BlockCoder:
    """Used by the scheduler. Does nothing for a pool without codecs."""

    def __init__(self, pool: BlockPool, cache: CacheCoordinator) -> None:
        self._pool = pool
        self._cache = cache
        self._groups = [g for g in range(len(pool.groups)) if pool.coded[g] is not None]

    def applies_to(self, request: Request) -> bool:
        return bool(self._groups) and request.codes_kv

    def rows(self, request: Request, count: int) -> int:
        """How many of a request's next `count` rows read the same codes. The row that makes
        the first token reads none: nothing is coded before that."""
        position = request.num_computed
        if position < request.num_prompt:
            return min(count, request.num_prompt - position)
        return min(count, rows_until_coding(position, self._pool.block_tokens))

    def backlog(self, request: Request) -> list[int]:
        """Indices of the blocks to be coded before the request's next row."""
        if request.num_computed < request.num_prompt:
            return []
        wanted = codable_blocks(request.num_computed, self._pool.block_tokens)
        return list(range(max(wanted.start, request.coded_until), wanted.stop))

    def can_code(self) -> bool:
        return all(self._pool.can_code(group) for group in self._groups)

    def code(self, request: Request, index: int) -> None:
        """Code one block of every group that has a codec; the exact one is let go. Where the
        disk has it the memory tier forgets it; else it stays there until its room is wanted."""
        if not request.cached.is_handed_over:
            self._cache.hand_over(request.cached)
        for group in self._groups:
            table = request.tables[group]
            block = table.blocks[index - table.first_block]
            coded = self._pool.code(group, block)
            if coded is not None:
                table.blocks[index - table.first_block] = coded
                if self._cache.disk is not None:
                    self._cache.index.forget_block(group, block)
                self._pool.release(group, block)
        request.coded_until = index + 1
