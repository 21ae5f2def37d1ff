"""One question for the engine: how much of this prompt is already known, and where.

Memory and disk are searched together: a prefix may be half in memory and half in files. What
is on disk is first read into the memory tier and then taken over like everything else. Only
the engine's thread calls this, but for `stats`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from osaurus.cache.blocks import BlockPool, BlockTable
from osaurus.cache.key import ModelKey, namespace_of, policy_salt
from osaurus.cache.lookup import PrefixLookup
from osaurus.cache.policy import resolve_kv_policy
from osaurus.cache.prefix import PrefixIndex
from osaurus.cache.restore import DiskRestore
from osaurus.cache.sequence import CachedSequence
from osaurus.cache.state_tier import StateTier
from osaurus.cache.storing import StoreQueue
from osaurus.types.cache import CacheConfig, CacheHints, CacheStats, KVMode

if TYPE_CHECKING:
    from osaurus.cache.disk import DiskStore

logger = logging.getLogger(__name__)


#: How long a shutdown waits for what is still to be written.
CLOSE_TIMEOUT_S = 30.0


class CacheCoordinator:
    """Finds, shares, labels and stores the blocks and snapshots of one model.

    `kv_mode` is the resolved one. `disk` None keeps nothing on disk, `disk_off` says why.
    """

    def __init__(
        self,
        pool: BlockPool,
        states: StateTier,
        model_key: ModelKey,
        config: CacheConfig,
        *,
        kv_mode: KVMode,
        disk: DiskStore | None = None,
        disk_off: str = "",
        topology: Mapping[str, int],
    ) -> None:
        self.config = config
        self.states = states
        self._pool = pool
        self._key = model_key
        self._kv_mode = kv_mode
        self.index = PrefixIndex(pool)
        self.disk = disk
        if disk is not None:
            # Now, since an import can fail later for want of file handles.
            import osaurus.cache.records  # noqa: F401
        self._lookup = PrefixLookup(
            pool, self.index, states, reuse_generated=config.reuse_generated
        )
        self._restore: DiskRestore | None = None
        self._queue: StoreQueue | None = None
        if disk is not None:
            self._restore = DiskRestore(pool, self.index, states, self._lookup, disk, self._count)
            self._queue = StoreQueue(pool, self.index, states, self._lookup, disk, model_key.name)
        self._serials = itertools.count(1)
        self._stats = CacheStats(
            model_key=str(model_key),
            budget_bytes=pool.budget_bytes + states.reserved_bytes,
            kv_mode=str(kv_mode),
            generated_kv="approximate" if config.reuse_generated else "not reused",
            topology=dict(topology),
            disk_off=disk_off,
        )

    def note_one_arithmetic(self) -> None:
        """Decoding has the arithmetic of prefill: what an answer leaves is what reading it as a
        prompt would make."""
        if self.config.reuse_generated:
            self._stats = replace(self._stats, generated_kv="exact")

    @property
    def keeps_blocks(self) -> bool:
        return self.config.use_paged_cache != "off" and self.config.memory_profile != "strict"

    @property
    def is_enabled(self) -> bool:
        return self.keeps_blocks or self.disk is not None

    # A request's beginning.

    def begin(self, prompt: Sequence[int], hints: CacheHints) -> CachedSequence:
        """The request's place in the cache; salts and keys are fixed here, once."""
        if not self.is_enabled:
            return CachedSequence.off(self._pool.block_tokens)
        mode, cap = resolve_kv_policy(
            replace(self.config, kv_mode=self._kv_mode),
            hints.kv_mode,
            None,
            len(prompt),
            # A prompt that does not fit the pool is refused before it comes here.
            full_kv_fits=True,
        )
        size = self._pool.block_tokens
        boundaries = self.states.boundaries(len(prompt), hints.stable_tokens)
        ends = [n // size * size for n in (hints.stable_tokens, len(prompt) - 1)]
        sequence = CachedSequence(
            namespace=namespace_of(self._key, hints, policy_salt(mode, cap)),
            serial=next(self._serials),
            block_tokens=size,
            prompt_tokens=len(prompt),
            exact_until=len(prompt) - 1,
            boundaries=boundaries,
            lasting=tuple(b for b in boundaries if b in ends and hints.media_salt is None),
        )
        sequence.extend(prompt)
        return sequence

    def sibling(self, sequence: CachedSequence) -> CachedSequence:
        """The place of another choice of the same prompt: its keys are the same."""
        return sequence.sibling(next(self._serials))

    def plan_restore(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Decide which records to read so that the longest prefix of `num_tokens` - 1 tokens
        can be taken over; returns their number. One token is always left to be fed."""
        if self._restore is None or sequence.is_off:
            return 0
        self._restore.plan(sequence, self._last_block(sequence, num_tokens))
        return len(sequence.record_keys)

    def restore_next(self, sequence: CachedSequence, wait_s: float = 0.0) -> int | None:
        """Bring one planned record into the memory tier; returns the tokens it covers up to,
        None while it is still being read, for which this waits at most `wait_s`. A record that
        cannot be read is counted and left out, with everything after it."""
        if self._restore is None or not sequence.record_keys:
            return 0
        return self._restore.read_next(sequence, wait_s)

    def take_over(
        self,
        sequence: CachedSequence,
        tables: Sequence[BlockTable],
        num_computed: int,
        num_tokens: int,
        slot: int,
    ) -> int:
        """Share the longest known prefix beyond `num_computed` into the tables, and bring the
        state slot there; returns how many tokens are computed now. One token is always left
        to be fed."""
        size = self._pool.block_tokens
        if num_computed % size or sequence.is_off:
            return num_computed
        first = num_computed // size
        last = self._last_block(sequence, num_tokens)
        for length in self._lookup.ends(sequence, first, last, tables):
            if self._restore_state(sequence, length, slot):
                break
        else:
            return num_computed
        chosen = [self._lookup.blocks_of(sequence, index) for index in range(first, length)]
        for group, table in enumerate(tables):
            begin = max(first, self._lookup.first_needed(group, length))
            blocks = [chosen[index - first][group] for index in range(begin, length)]
            table.adopt(begin, [block for block in blocks if block is not None], self._pool)
        for index in range(first, length):
            if not self._lookup.is_exact(sequence, index, length):
                sequence.exact_until = min(sequence.exact_until, index * size)
                break
        sequence.labelled = max(sequence.labelled, length)
        return length * size

    def _restore_state(self, sequence: CachedSequence, length: int, slot: int) -> bool:
        """Bring a slot to where it stands after `length` blocks; at once without state."""
        if not self.states.is_used:
            return True
        size = self._pool.block_tokens
        key = self._lookup.snapshot_key(sequence, length - 1)
        if key is None or not self.states.restore(key, slot, length * size):
            return False
        if key != sequence.exact_key(length - 1):
            sequence.exact_until = min(sequence.exact_until, (length - 1) * size)
        return True

    def _last_block(self, sequence: CachedSequence, num_tokens: int) -> int:
        """The most blocks that can be taken over of `num_tokens`: one token is to be fed."""
        return min((num_tokens - 1) // self._pool.block_tokens, len(sequence.digests))

    def released(self, sequence: CachedSequence) -> None:
        """The request gave its blocks up and will start over: it labels anew."""
        sequence.labelled = sequence.proven = 0

    def report_lookup(self, sequence: CachedSequence, matched: int) -> None:
        """Count a request's lookup, once, with the tokens it took over at admission."""
        if sequence.is_off:
            return
        if self.states.is_used:
            reached = range(matched // self._pool.block_tokens)
            chain = [self._lookup.keys(sequence, index) for index in reached]
            self.states.snapshots.newest([key for keys in chain for key in reversed(keys)])
        sequence.matched_tokens = sequence.reached_tokens = matched
        if matched == 0:
            sequence.detail = "miss"
        elif sequence.detail != "disk":
            sequence.detail = "paged"
        elif self.disk is not None:
            self.disk.touch(sequence.read_keys)
        self._count(
            lookups=1,
            misses=int(matched == 0),
            memory_hits=int(sequence.detail == "paged"),
            disk_hits=int(sequence.detail == "disk"),
            hit_tokens=matched,
            prompt_tokens=sequence.prompt_tokens,
        )

    def extended(self, sequence: CachedSequence, reached: int) -> None:
        """The request, which had been looked up, stands at `reached` tokens of its prompt now:
        others computed the rest meanwhile. What it had taken over before, until it lost its
        blocks, does not count twice."""
        added = min(reached, sequence.prompt_tokens - 1) - sequence.reached_tokens
        if added <= 0 or sequence.is_off:
            return
        if sequence.matched_tokens == 0:
            self._count(misses=-1, memory_hits=1)
            sequence.detail = "paged"
        sequence.matched_tokens += added
        sequence.reached_tokens += added
        self._count(hit_tokens=added)

    # While it runs.

    def computed(
        self,
        sequence: CachedSequence,
        tables: Sequence[BlockTable],
        tokens: Callable[[int, int], Sequence[int]],
        num_computed: int,
    ) -> None:
        """Make blocks findable that have become full. `tokens(a, b)` gives the sequence's
        tokens [a, b). A block that was there before takes the place of an equal new one."""
        size = self._pool.block_tokens
        if sequence.is_off:
            return
        for index in range(sequence.labelled, num_computed // size):
            if index >= len(sequence.digests):
                sequence.append(tokens(index * size, (index + 1) * size))
            own: list[int | None] = [None] * len(tables)
            for group, table in enumerate(tables):
                place = index - table.first_block
                own[group] = table.blocks[place] if 0 <= place < len(table.blocks) else None
            key = sequence.own_key(index)
            kept = self.index.put(key, own, maker=sequence.serial)
            exact = key == sequence.exact_key(index)
            for group, table in enumerate(tables):
                mine, theirs = own[group], kept[group]
                if exact and mine is not None and theirs is not None and mine != theirs:
                    table.blocks[index - table.first_block] = self._pool.share(group, theirs)
                    self._pool.release(group, mine)
        sequence.labelled = max(sequence.labelled, num_computed // size)

    def chunk_end(self, sequence: CachedSequence, first: int, last: int) -> int:
        """Where a chunk from `first` has to stop: at `last`, or before it where a snapshot is
        still to be taken."""
        size = self._pool.block_tokens
        for boundary in sequence.boundaries:
            is_inside = first < boundary < last
            if is_inside and sequence.own_key(boundary // size - 1) not in self.states.snapshots:
                return boundary
        return last

    def capture(self, sequence: CachedSequence, num_computed: int, slot: int) -> None:
        """Take a snapshot if this is a boundary of the prompt; `computed` comes first."""
        if num_computed not in sequence.boundaries:
            return
        key = sequence.own_key(num_computed // self._pool.block_tokens - 1)
        if self.states.capture(key, slot, num_computed):
            sequence.unproven_snapshots.append(key)

    def prove(self, sequence: CachedSequence) -> None:
        """A token with finite logits was sampled: everything before it is finite."""
        sequence.unproven_snapshots.clear()
        if sequence.labelled > sequence.proven:
            self.index.prove(self._lookup.own_keys(sequence, sequence.proven))
            sequence.proven = sequence.labelled

    def reject(self, sequence: CachedSequence) -> None:
        """The request failed: nothing unproven of it stays."""
        self.index.forget(self._lookup.own_keys(sequence), unproven_only=True)
        self.states.forget(sequence.unproven_snapshots)

    def reject_all(self, sequence: CachedSequence) -> None:
        """Its logits were not finite: no block or snapshot that it read may serve again, nor
        be read back. Another's finite logits prove little beyond a window."""
        keys = self._lookup.all_keys(sequence)
        self.index.forget(keys, disproven=True)
        self.states.forget(keys)
        if self._restore is not None:
            self._restore.reject(sequence)

    def hand_over(self, sequence: CachedSequence) -> None:
        """Queue what is exact of a sequence for the disk, before its blocks are coded and
        leave the memory tier."""
        sequence.is_handed_over = True
        self._queue_for_disk(sequence)

    def _queue_for_disk(self, sequence: CachedSequence) -> None:
        if self._queue is None or sequence.is_off:
            return
        try:
            self._count(stores_dropped=self._queue.add(sequence))
        except Exception:
            # Whatever happens to a store, no answer depends on it.
            self._count(store_failures=1)
            logger.exception("blocks of %s were not queued for the disk", self._key.name)

    def finished(self, sequence: CachedSequence, *, store: bool) -> None:
        """Queue the request's blocks for the disk (its tables still hold them) and drop what
        the settings do not let stay in memory."""
        if store and not sequence.is_handed_over:
            self._queue_for_disk(sequence)
        if not self.keeps_blocks:
            keys = self._lookup.all_keys(sequence)
            self.index.forget(keys)
            self.states.forget(keys)

    def replay_of(self, sequence: CachedSequence) -> CachedSequence | None:
        """A finished request's prompt up to the last of its lasting boundaries that has no
        snapshot; None when all have one, and where such replays are switched off. The tokens
        of media do not tell their state: prompts with any have no lasting boundaries."""
        size = self._pool.block_tokens
        missing = [b for b in sequence.lasting if not self._has_state(sequence, b // size - 1)]
        if not missing or not self.config.rederive:
            return None
        return CachedSequence(
            namespace=sequence.namespace,
            serial=next(self._serials),
            block_tokens=size,
            prompt_tokens=missing[-1] + 1,
            exact_until=missing[-1],
            boundaries=tuple(missing),
            digests=sequence.digests[: missing[-1] // size],
        )

    def _has_state(self, sequence: CachedSequence, index: int) -> bool:
        keys = self._lookup.snapshot_keys(sequence, index)
        on_disk = self._queue is not None and any(map(self._queue.has_snapshot, keys))
        return on_disk or self._lookup.has_snapshot(sequence, index)

    # Storing, in small pieces between steps.

    @property
    def has_work(self) -> bool:
        return self._queue is not None and len(self._queue) > 0

    @property
    def can_store(self) -> bool:
        """Whether the writer would take the next record now."""
        return self._queue is not None and self._queue.can_store

    def store_next(self) -> bool:
        """Copy one record for the writer; False when there is none or the writer is busy."""
        if self._queue is None or not self._queue.can_store:
            return False
        try:
            self._queue.store_next()
        except Exception:
            # Whatever happens to a store, no answer depends on it.
            self._count(store_failures=1)
            logger.exception("a record of %s was not stored", self._key.name)
        return True

    def drop_pending(self) -> bool:
        """Give back the blocks that wait to be stored; False when there are none. For a pool
        that has run dry: an answer matters more than a record."""
        dropped = 0 if self._queue is None else self._queue.drop()
        self._count(stores_dropped=dropped)
        return dropped > 0

    # Stats and clearing.

    @property
    def expires_at(self) -> float | None:
        """When the prefix in memory that nobody has used for longest has to go, on the clock
        of the pools; None where prefixes have no such time, or there are none."""
        if self.config.prefix_ttl_s is None:
            return None
        used = (self._pool.oldest_release, self.states.snapshots.oldest_use)
        return min((at + self.config.prefix_ttl_s for at in used if at is not None), default=None)

    def expire(self, now: float) -> None:
        """Let go of what nobody has used for too long."""
        if self.config.prefix_ttl_s is not None:
            limit = now - self.config.prefix_ttl_s
            self._pool.evict_older(limit)
            self.states.snapshots.drop_older(limit)

    def forget_memory(self) -> None:
        """Forget every prefix of this model that memory holds; what is on disk stays."""
        self.index.clear()
        self.states.snapshots.clear()

    def clear(self) -> None:
        """Forget every prefix of this model in memory and on disk."""
        self.drop_pending()
        self.forget_memory()
        if self.disk is not None:
            self.disk.clear_soon(self._key.name)

    def stats(self) -> CacheStats:
        return replace(
            self._stats,
            held_bytes=self._pool.used_bytes + self.states.slots.used_bytes,
            cached_bytes=self._pool.cached_bytes,
            cached_blocks=self._pool.cached_blocks,
            evictions=self._pool.evictions,
            coded_blocks=self._pool.coded.num_held,
            coded_bytes=self._pool.coded.used_bytes,
            exact_reasons=self._exact_reasons(),
            snapshots=len(self.states.snapshots),
            snapshot_bytes=self.states.snapshots.nbytes,
            disk={} if self.disk is None else dict(self.disk.stats()),
        )

    def _exact_reasons(self) -> dict[str, str]:
        """Why layers keep exact blocks, by kind; empty for those that may be coded."""
        return {
            group.topology.kind: reason
            for group, reason in zip(self._pool.groups, self._pool.coded.reasons, strict=False)
        }

    def close(self) -> None:
        """Write what is queued and let go of the disk; memory goes with the pool. What is not
        written within `CLOSE_TIMEOUT_S` is given up."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        if self._queue is not None:
            try:
                self._count(stores_dropped=self._queue.write_all(CLOSE_TIMEOUT_S))
            except Exception:
                logger.exception("the prefixes of %s were not all stored", self._key.name)
                self._queue.drop()
        if self._restore is not None:
            self._restore.close()
        if self.disk is not None:
            self.disk.close(max(0.1, deadline - time.monotonic()))

    def _count(self, **amounts: int) -> None:
        changed = {name: getattr(self._stats, name) + n for name, n in amounts.items()}
        self._stats = replace(self._stats, **changed)
