"""Who runs in this step: admission, decode rows, one prefill chunk, preemption.

Policy. Admission is FIFO and never overtakes; it reserves the blocks a request is likely to
need, not the most it could, and a slot for its state. Every decoding request gets its rows in
every step; prefilling ones take turns, one chunk a step. When the pool runs dry the newest
request gives its memory back and returns to the head of the queue. Decides; runs nothing and
samples nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from osaurus.cache.blocks import BlockPool
from osaurus.cache.coordinator import CacheCoordinator
from osaurus.cache.states import StatePool
from osaurus.engine.coding import BLOCKS_A_STEP, BlockCoder
from osaurus.engine.request import NO_SLOT, Phase, Request

#: Output tokens reserved at admission beyond the prompt.
LIKELY_NEW_TOKENS = 256
#: Decode rows one request may have in one step when it catches up after a preemption.
MAX_CATCH_UP_ROWS = 8
#: The smallest chunk while streams run: a chunk has a cost that does not shrink with it, unless
#: it goes with the streams' own rows.
MIN_CHUNK_TOKENS, MIN_JOINT_CHUNK_TOKENS = 64, 32
#: What shared chunks are multiples of.
CHUNK_UNIT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of one request: its tokens [first, first + count)."""

    request: Request
    first: int
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether the last row's logits choose the next token."""
        return self.first + self.count == self.request.num_tokens


class Scheduler:
    """Owned by the engine's thread; `active` is in order of admission."""

    def __init__(
        self,
        pool: BlockPool,
        slots: StatePool,
        *,
        cache: CacheCoordinator,
        max_batch_size: int,
        max_context_tokens: int,
        chunk_tokens: int,
        latency_budget_s: float,
        prefill_batch_size: int | None = None,
    ) -> None:
        self.pool = pool
        self.slots = slots
        self.cache = cache
        self.max_batch_size = max_batch_size
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.coder = BlockCoder(pool, cache)
        self.preemptions = 0
        self.forks = 0
        self._max_context = max_context_tokens
        self._chunk_limit = chunk_tokens
        self._prefill_batch_size = prefill_batch_size
        self._latency_budget_s = latency_budget_s
        self._shared_chunk = min(chunk_tokens, 2 * MIN_CHUNK_TOKENS)
        self._last_prefilled: Request | None = None

    @property
    def is_decoding(self) -> bool:
        return any(request.phase is Phase.DECODE for request in self.active)

    def admit(self) -> list[Request]:
        """Move requests from the queue's head into the batch; return those admitted."""
        admitted: list[Request] = []
        while self.waiting and len(self.active) < self.max_batch_size and self.slots.num_free:
            request = self.waiting[0]
            # Blocks that wait for the writer must not keep a request waiting.
            if (
                self.active
                and not self._fits(request)
                and not (self.cache.drop_pending() and self._fits(request))
            ):
                break
            self.waiting.popleft()
            request.state_slot = self.slots.allocate()
            self.active.append(request)
            source = request.fork_source
            if source is not None and source.is_active and request.num_computed == 0:
                request.phase = Phase.FORKING
            else:
                request.settle_phase()
            admitted.append(request)
        return admitted

    def _fits(self, newcomer: Request) -> bool:
        wanted = self._likely_missing(newcomer)
        for request in self.active:
            wanted = [a + b for a, b in zip(wanted, self._likely_missing(request), strict=True)]
        return self.pool.can_allocate(wanted)

    def _likely_missing(self, request: Request) -> list[int]:
        """Blocks of each group that a request is likely to ask for still."""
        left = request.max_new_tokens - len(request.generated)
        tokens = min(request.num_tokens + min(left, LIKELY_NEW_TOKENS), self._max_context)
        return [
            max(0, self._blocks_held_at(index, tokens) - len(table.blocks))
            for index, table in enumerate(request.tables)
        ]

    def _blocks_held_at(self, group: int, tokens: int) -> int:
        """Blocks a request of that length holds at most in a group."""
        size = self.pool.block_tokens
        blocks = -(-tokens // size)
        window = self.pool.groups[group].topology.window
        if window is None:
            return blocks
        return min(blocks, -(-(window + self._chunk_limit) // size) + 1)

    def plan_decode(self) -> list[RowSpan]:
        """Rows of every decoding request, oldest first. May preempt the newest."""
        spans: list[RowSpan] = []
        for request in list(self.active):
            if request.phase is Phase.FORKING:
                self._try_fork(request)
            if request.phase is not Phase.DECODE:
                continue
            count = min(request.num_tokens - request.num_computed, MAX_CATCH_UP_ROWS)
            if self.coder.applies_to(request):
                count = self.coder.rows(request, count) if self._code(request) else 0
            if count and self._make_room(request, request.num_computed + count):
                spans.append(RowSpan(request, request.num_computed, count))
        return spans

    def _code(self, request: Request) -> bool:
        """Compress what the request's next row reads compressed, a few blocks a step; False
        while some are left, or when the request had to make room."""
        backlog = self.coder.backlog(request)
        for index in backlog[:BLOCKS_A_STEP]:
            while not self.coder.can_code():
                if not self._free_some(request):
                    return False
            self.coder.code(request, index)
        if not 1 < len(backlog) <= BLOCKS_A_STEP:
            return len(backlog) <= 1
        # The end of a prompt's worth of blocks: their exact pages are worth returning now.
        self.pool.give_back_pages()
        return True

    def plan_prefill(self) -> RowSpan | None:
        """The next chunk of the prefilling request whose turn it is."""
        candidates = [r for r in self.active if r.phase is Phase.PREFILL]
        candidates = candidates[: self._prefill_batch_size]
        if not candidates:
            return None
        if self._last_prefilled in candidates:
            turn = (candidates.index(self._last_prefilled) + 1) % len(candidates)
        else:
            turn = 0
        request = candidates[turn]
        if self._extend_prefix(request) and request.phase is not Phase.PREFILL:
            return None
        limit = self._shared_chunk if self.is_decoding else self._chunk_limit
        first = request.num_computed
        last = self.cache.chunk_end(request.cached, first, min(request.num_prefill, first + limit))
        if not self._make_room(request, last):
            return None
        self._last_prefilled = request
        return RowSpan(request, first, last - first)

    def take_over(self, request: Request) -> int:
        """Share what the cache knows beyond the request's computed tokens; returns how many
        tokens that adds."""
        before = request.num_computed
        request.num_computed = self.cache.take_over(
            request.cached, request.tables, before, request.num_tokens, request.state_slot
        )
        self._drop_passed(request)
        return request.num_computed - before

    def _extend_prefix(self, request: Request) -> bool:
        """Take over what another request has computed of this prompt since the last chunk."""
        added = self.take_over(request)
        if added:
            if request.was_looked_up:
                self.cache.extended(request.cached, request.num_computed)
            request.settle_phase()
        return added > 0

    def learn_chunk_time(self, count: int, took_s: float, *, is_joint: bool) -> None:
        """Size the next shared chunk by what a token of the last chunk took."""
        smallest = MIN_JOINT_CHUNK_TOKENS if is_joint else MIN_CHUNK_TOKENS
        if count < smallest or took_s <= 0:
            return  # the end of a prompt: its cost is not that of its tokens
        fits = int(count * self._latency_budget_s / took_s)
        fits -= fits % CHUNK_UNIT_TOKENS
        self._shared_chunk = min(self._chunk_limit, max(smallest, fits))

    def fed(self, span: RowSpan) -> None:
        """The span's keys and values are in place and its tokens are in the state."""
        request = span.request
        request.num_computed = span.first + span.count
        self.cache.computed(
            request.cached, request.tables, request.tokens_between, request.num_computed
        )
        self.cache.capture(request.cached, request.num_computed, request.state_slot)
        self._drop_passed(request)
        if request.phase is Phase.PREFILL and request.num_computed >= request.num_prefill:
            request.settle_phase()
            self._fork_siblings(request)

    def _drop_passed(self, request: Request) -> None:
        for table, group in zip(request.tables, self.pool.groups, strict=True):
            table.drop_before(group.topology.first_needed_token(request.num_computed), self.pool)

    def _fork_siblings(self, source: Request) -> None:
        for request in self.active:
            if request.phase is Phase.FORKING and request.fork_source is source:
                self._try_fork(request)

    def _try_fork(self, request: Request) -> None:
        """Take over a sibling's prompt blocks and a copy of its state, or prefill alone when
        there are none; state that has absorbed more than the prompt is none."""
        source = request.fork_source
        if source is None or not source.is_active or source.num_computed < source.num_prefill:
            if source is None or source.phase not in (Phase.PREFILL, Phase.RESTORING):
                request.settle_phase()
            return
        length = request.num_prefill
        covered = source.coded_until == 0 and all(
            table.first_block * self.pool.block_tokens <= group.topology.first_needed_token(length)
            for table, group in zip(source.tables, self.pool.groups, strict=True)
        )
        if self.cache.states.is_used:
            covered = covered and source.num_computed == length
        if covered and self.pool.can_allocate([1] * len(self.pool.groups)):
            request.tables = [table.fork(length, self.pool) for table in source.tables]
            self.slots.copy_slot(source.state_slot, request.state_slot, length)
            request.num_computed = length
            request.cached.forked_from(source.cached, length)
            self.forks += 1
        request.settle_phase()

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give the request slots for its first `num_tokens`; False when it was preempted."""
        size = self.pool.block_tokens
        missing = [table.missing(num_tokens, size) for table in request.tables]
        while not self.pool.can_allocate(missing):
            if not self._free_some(request):
                return False
        for table in request.tables:
            table.grow(num_tokens, self.pool)
        return True

    def _free_some(self, request: Request) -> bool:
        """Make room in a pool that has run dry, at the cost of the newest request if nothing
        else helps; False when that is the given one."""
        if self.cache.drop_pending():
            return True
        newest = self.active[-1]
        self.preempt(newest)
        return newest is not request

    def start_over(self, spans: Sequence[RowSpan]) -> None:
        """A forward of these spans failed after it may have changed their state: compute it
        anew from what is known, and feed each of them alone until it is past the fault."""
        for span in reversed(spans):
            span.request.alone_until = span.first + span.count
            self.preempt(span.request)

    def preempt(self, request: Request) -> None:
        """Back to the head of the queue, without memory. What it has generated stays."""
        self.active.remove(request)
        # Until a first token was sampled nothing has shown its keys and values finite.
        request.poisoned |= request.first_token_at is None
        request.release_memory(self.pool, self.slots)
        self.cache.released(request.cached)
        request.phase = Phase.WAITING
        self.waiting.appendleft(request)
        self.preemptions += 1

    def remove(self, request: Request) -> None:
        """Forget a finished request and take its memory back."""
        if request in self.active:
            self.active.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.release_memory(self.pool, self.slots)
        request.phase = Phase.FINISHED
        if self._last_prefilled is request:
            self._last_prefilled = None

    def check(self) -> None:
        """Raise AssertionError when a request is in the wrong place or blocks are lost."""
        self.pool.check()
        self.cache.index.check()
        self.cache.states.check()
        held: Sequence[Request] = [*self.active, *self.waiting]
        assert len(set(map(id, held))) == len(held), "a request is queued twice"
        assert all(r.phase is Phase.WAITING for r in self.waiting), "active request in the queue"
        assert all(r.is_active for r in self.active), "idle request in the batch"
        assert not any(t.blocks for r in self.waiting for t in r.tables), "queued with blocks"
        slots = [r.state_slot for r in self.active]
        assert NO_SLOT not in slots, "active without a state slot"
        assert len(set(slots)) == len(slots), "a state slot is shared"
        assert all(r.state_slot == NO_SLOT for r in self.waiting), "queued with a state slot"
        assert self.slots.num_held == len(slots), "a state slot is lost"
