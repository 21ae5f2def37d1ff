"""The engine's loop: one thread that owns the model, the pool and every request.

    step = settle cancels -> admit -> decode forward -> sample and settle
           -> one prefill chunk -> settle; both in one forward where the model takes that

Public calls only queue operations under a lock; the thread applies them between steps. A
test builds the engine with `start=False` and calls `step()` itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from osaurus.cache.policy import resolve_load_mode
from osaurus.cache.sequence import CachedSequence
from osaurus.engine.cache import open_cache
from osaurus.engine.client import Mailbox, Stream
from osaurus.engine.decode_threads import DecodeThreads
from osaurus.engine.device import OwnDevice, is_device_lost
from osaurus.engine.idle import IdleCare
from osaurus.engine.memory import context_exceeded, memory_exceeded
from osaurus.engine.pools import build_pools
from osaurus.engine.rate import RollingTokenRate
from osaurus.engine.rederive import Rederiver
from osaurus.engine.request import Phase, Request, choices_of, refused
from osaurus.engine.reuse import PrefixReuse
from osaurus.engine.runner import Runner
from osaurus.engine.sampler import Sampled, sample_rows
from osaurus.engine.scheduler import RowSpan, Scheduler
from osaurus.engine.stats import EngineStats
from osaurus.errors import (
    EngineShutdown,
    InvalidField,
    InvalidMaxBatchSize,
    OsaurusError,
)
from osaurus.kernels.cpu_topology import choose_threads, stay_on
from osaurus.kernels.heap import keep_heap_pages, trim_heap
from osaurus.kernels.openmp import release_team
from osaurus.models.base import Model
from osaurus.types.cache import CacheHints, CacheStats
from osaurus.types.engine import (
    CapacitySnapshot,
    DeviceSeat,
    EngineConfig,
    EventStream,
    GenerationRequest,
)
from osaurus.types.events import Info, PrefillProgress, StopReason

logger = logging.getLogger(__name__)

#: How long an idle engine waits for a busy writer before it looks again.
WRITER_WAIT_S = 0.02
#: With streams decoding a record is copied for the writer once in so many steps: both cost
#: them time, and nobody waits for it.
STORE_EVERY_STEPS = 24
#: Loop steps between two returns of free heap pages to the system.
PURGE_INTERVAL_STEPS = 256
#: A prompt this long leaves enough garbage to purge at once.
PURGE_PROMPT_TOKENS = 4096
#: A decoding or forking request that stands still this long is ended.
WATCHDOG_S = 30.0


class BatchEngine:
    """Implements `types.engine.Engine` for one model.

    `token_bytes` gives a token's bytes for logprobs. `seat` is held for every step: the way
    to the device when several models share it. `clock` is monotonic seconds. `identity`,
    NAME@FINGERPRINT, parts this bundle's cache from others'; without one nothing is kept on
    disk. The lock
    guards the queue of operations and the numbers of `capacity_snapshot`; no forward runs
    under it.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        token_bytes: Callable[[int], bytes],
        seat: DeviceSeat | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "model",
        identity: str | None = None,
        start: bool = True,
    ) -> None:
        config = config or EngineConfig()
        if config.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {config.max_batch_size}")
        kv_mode = resolve_load_mode(
            config.cache.kv_mode, identity or "", (t.kind for t in model.layers_topology)
        )
        self.pool, self.states, self.max_context_tokens = build_pools(model, config, kv_mode)
        self.cache = open_cache(model, self.pool, self.states, config.cache, identity, kv_mode)
        self.scheduler = Scheduler(
            self.pool,
            self.states.slots,
            cache=self.cache,
            max_batch_size=config.max_batch_size,
            max_context_tokens=self.max_context_tokens,
            chunk_tokens=config.prefill_chunk_tokens,
            latency_budget_s=config.latency_budget_ms / 1000,
            prefill_batch_size=config.prefill_batch_size,
        )
        self.config = config
        self.stats = EngineStats()
        self._vocab_size = model.vocab_size
        self._model_context_tokens = min(
            model.max_context_tokens, config.max_context_tokens or model.max_context_tokens
        )
        self._runner = Runner(model, self.pool, self.states.slots)
        if self._runner.takes_both:
            self.cache.note_one_arithmetic()
        self._reuse = PrefixReuse(self.scheduler, self.cache, self._report)
        self._rederiver = Rederiver(self.scheduler, self.cache)
        self._token_bytes = token_bytes
        self._seat = seat or OwnDevice()
        self._clock = self.pool.clock = self.states.snapshots.clock = clock
        self._idle = IdleCare(self.cache, self.pool, sleep_s=config.light_sleep_s, clock=clock)
        # Reentrant: the collector may drop a stream, which cancels, on a thread that holds it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._operations: list[Callable[[], None]] = []
        self._requests: dict[str, list[Request]] = {}
        self._shutting_down = False
        self._stopped = threading.Event()
        self._failure: str | None = None
        self._rate = RollingTokenRate()
        self._high_watermark = 0
        self._steps_to_purge = PURGE_INTERVAL_STEPS
        self._threads = choose_threads(config.threads)
        self._decode_threads = DecodeThreads(self._threads.threads, torch.set_num_threads)
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._run, name=f"engine:{name}", daemon=True)
            self._thread.start()

    # Public calls, from any thread.

    def generate(self, request: GenerationRequest) -> list[EventStream]:
        """See `types.engine.Engine`. Raises `InvalidField` for an empty prompt, an id
        outside the vocabulary or a request id that is in use."""
        prompt = list(request.token_ids)
        if not prompt:
            raise InvalidField("prompt", "must hold at least one token")
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise InvalidField("prompt", f"token ids must be below {self._vocab_size}")
        request.params.validate()
        boxes = [Mailbox() for _ in range(request.n)]
        streams: list[EventStream] = [
            Stream(request.request_id, box, partial(self._cancel_choice, request.request_id, i))
            for i, box in enumerate(boxes)
        ]
        error = self.refusal(len(prompt))
        refusal = None if error is None else refused(prompt, error)
        if refusal is None:
            choices = choices_of(
                request,
                prompt,
                boxes,
                room=self.max_context_tokens - len(prompt),
                vocab_size=self._vocab_size,
                num_groups=len(self.pool.groups),
                open_cached=partial(self._open_cached, prompt, request.cache),
                now=self._clock(),
            )
            with self._lock:
                if not self._shutting_down:
                    if request.request_id in self._requests:
                        raise InvalidField("request_id", f"{request.request_id!r} is in use")
                    self._requests[request.request_id] = choices
                    self._operations.append(partial(self.scheduler.waiting.extend, choices))
                    self._changed.notify()
                    return streams
            refusal = Info(prompt_tokens=len(prompt), stop_reason="cancelled")
        for box in boxes:
            box.put(refusal)
            box.mark_drained()
        return streams

    def refusal(self, prompt_tokens: int) -> OsaurusError | None:
        if prompt_tokens < self.max_context_tokens:
            return None
        if prompt_tokens >= self._model_context_tokens:
            return context_exceeded(prompt_tokens, self._model_context_tokens)
        return memory_exceeded(
            self.pool, prompt_tokens + 1, self.max_context_tokens, self.config.prefill_chunk_tokens
        )

    def _open_cached(
        self, prompt: list[int], hints: CacheHints, first: CachedSequence | None
    ) -> CachedSequence:
        return self.cache.begin(prompt, hints) if first is None else self.cache.sibling(first)

    def cancel(self, request_id: str) -> bool:
        with self._lock:
            known = [r for r in self._requests.get(request_id, []) if not r.mailbox.completed]
            for request in known:
                request.cancelled = True
            self._notify()
            return bool(known)

    def update_max_batch_size(self, n: int) -> None:
        if n < 1:
            raise InvalidMaxBatchSize(n)
        with self._lock:
            if self._shutting_down:
                raise EngineShutdown("the engine has shut down; load the model again")
            self.scheduler.max_batch_size = n
            self._operations.append(partial(self._add_slots, n))
            self._changed.notify()

    def capacity_snapshot(self) -> CapacitySnapshot:
        with self._lock:
            unfinished = [r for group in self._requests.values() for r in group]
            active = sum(r.is_active for r in unfinished)
            return CapacitySnapshot(
                configured_maximum=self.scheduler.max_batch_size,
                active_count=active,
                pending_count=sum(r.phase is Phase.WAITING for r in unfinished),
                active_count_high_watermark=self._high_watermark,
                is_accepting_requests=not self._shutting_down,
                is_shutdown=self._shutting_down,
                kv_blocks_total=self.pool.total_blocks,
                kv_blocks_free=self.pool.free_blocks,
                tokens_per_second=self._rate.current(self._clock()),
                failure=self._failure,
            )

    def cache_stats(self) -> CacheStats:
        return self.cache.stats()

    def clear_cache(self) -> None:
        """Returns at once; the engine's thread forgets everything before its next step."""
        with self._lock:
            if not self._shutting_down:
                self._operations.append(self.cache.clear)
                self._changed.notify()

    def shutdown(self) -> None:
        """Returns when nothing of this engine runs any more; every caller waits for that."""
        with self._lock:
            self._shutting_down = True
            self._notify()
        if self._thread is None:
            self._end_everything(None)
        elif self._thread is not threading.current_thread():
            self._stopped.wait()
            self._thread.join()

    def _cancel_choice(self, request_id: str, index: int) -> None:
        with self._lock:
            for request in self._requests.get(request_id, []):
                if request.index == index:
                    request.cancelled = True
            self._notify()

    def _notify(self) -> None:
        """Under the lock: wake the thread, which may wait for work or for the device."""
        self._changed.notify()
        self._seat.nudge()

    # The engine's thread.

    def _run(self) -> None:
        stay_on(self._threads.keep_to)
        torch.set_num_threads(self._threads.threads)
        keep_heap_pages()
        error: str | None = None
        try:
            while self._wait_for_work():
                self.step()
        except Exception as failure:
            # A fault outside any one request: nothing this engine holds can be trusted. Its
            # weights can, so the runtime builds another engine on them.
            error = f"the engine failed: {type(failure).__name__}: {failure}"
            logger.exception("%s stopped", threading.current_thread().name)
        finally:
            self._end_everything(error)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False once the engine shuts down."""
        if not (self._operations or self._has_work()):
            release_team()
        with self._lock:
            while not (self._shutting_down or self._operations or self._has_work()):
                if self.cache.has_work:
                    if self.cache.can_store:
                        break
                    self._changed.wait(WRITER_WAIT_S)
                else:
                    due_s = self._idle.due_in()
                    if due_s == 0:
                        break
                    self._changed.wait(due_s)
            return not self._shutting_down

    def _has_work(self) -> bool:
        requests = self.scheduler.active or self.scheduler.waiting
        return bool(requests) or self._rederiver.has_work

    def _apply_operations(self) -> None:
        with self._lock:
            operations, self._operations = self._operations, []
            for operation in operations:
                operation()

    def step(self) -> None:
        """One turn of the loop; harmless without work."""
        self._apply_operations()
        self._settle_cancelled()
        self._idle.run(is_busy=self._has_work())
        with torch.inference_mode(), self._seat.hold(self._look_after) as has_device:
            self._settle_cancelled()
            if self._shutting_down or not has_device:
                return
            self._admit()
            self._restore()
            self._rederiver.settle()
            self._forward()
        if not self.scheduler.is_decoding or self.stats.steps % STORE_EVERY_STEPS == 0:
            self.cache.store_next()
        self._watch()
        self.stats = self.stats.plus(steps=1)
        self._maybe_purge()

    def _look_after(self) -> bool:
        """During a wait for the device, which may last a whole load of another model."""
        self._settle_cancelled()
        return not self._shutting_down

    def _add_slots(self, count: int) -> None:
        """Until there are slots for a larger batch, no more requests are admitted."""
        try:
            self.states.slots.grow(count)
        except (MemoryError, RuntimeError) as failure:
            logger.warning("no memory for the state of %d requests: %s", count, failure)
        self._runner.bind()

    def _settle_cancelled(self) -> None:
        for request in [*self.scheduler.active, *self.scheduler.waiting]:
            if request.cancelled:
                self._finish(request, "cancelled")

    def _admit(self) -> None:
        now = self._clock()
        with self._lock:
            admitted = self.scheduler.admit()
            self._high_watermark = max(self._high_watermark, len(self.scheduler.active))
        for request in admitted:
            request.last_progress_at = now
            if request.admitted_at is None:
                request.admitted_at = now
                total = request.num_prompt
                self._report(
                    request,
                    PrefillProgress(stage="queued", completed=0, total=total, detail="admitted"),
                )
            if request.phase is not Phase.FORKING:
                self._guarded(request, self._reuse.look_up)
                self._note_restored(request)

    def _restore(self) -> None:
        """Read one record for the oldest request that waits for the disk."""
        request = self._reuse.restoring()
        if request is not None:
            self._guarded(request, self._reuse.read_record)
            request.last_progress_at = self._clock()
            self._note_restored(request)

    def _note_restored(self, request: Request) -> None:
        if request.restored_at is None and request.phase is not Phase.RESTORING:
            request.restored_at = self._clock()

    def _forward(self) -> None:
        spans = self.scheduler.plan_decode()
        if not spans or not self._runner.takes_both or self._must_part(spans):
            self._decode(spans)
            self._prefill(self.scheduler.plan_prefill())
            return
        chunk = self.scheduler.plan_prefill()
        # Room for the chunk may have cost the newest of them theirs.
        spans = [span for span in spans if span.request.phase is Phase.DECODE]
        if not (chunk and spans and self._decode_and_prefill(spans, chunk)):
            self._decode(spans)
            self._prefill(chunk)

    def _must_part(self, spans: Sequence[RowSpan]) -> bool:
        size = self.config.decode_batch_size or len(spans)
        return len(spans) > size or any(span.request.is_alone for span in spans)

    def _decode_and_prefill(self, spans: Sequence[RowSpan], chunk: RowSpan) -> bool:
        """All in one forward, which reads the weights once; False when it failed, and each must
        be tried by itself."""
        start = self._clock()
        self._decode_threads.use()
        try:
            sampled = self._forward_and_sample([*spans, chunk])
        except Exception as failure:
            if is_device_lost(failure):
                raise
            self.stats = self.stats.plus(forward_retries=1)
            return False
        took_s = self._clock() - start
        self.stats = self.stats.plus(decode_rows=sum(span.count for span in spans))
        self._settle_decode([(spans, sampled)])
        self._settle_chunk(chunk, took_s, is_joint=True)
        return True

    def _decode(self, spans: Sequence[RowSpan]) -> None:
        if not spans:
            return
        rows = sum(span.count for span in spans)
        self.stats = self.stats.plus(decode_rows=rows)
        self._decode_threads.begin()
        outcome = self._run_decode(spans)
        self._decode_threads.end(rows)
        self._settle_decode(outcome)

    def _settle_decode(
        self, outcome: Sequence[tuple[Sequence[RowSpan], Sequence[Sampled]]]
    ) -> None:
        self._rate.observe(sum(len(sampled) for _, sampled in outcome), self._clock())
        for group, sampled in outcome:
            outcomes = iter(sampled)
            now = self._clock()
            for span in group:
                self.scheduler.fed(span)
                span.request.last_progress_at = now
                if span.reaches_end:
                    self._guarded(span.request, self._settle_token, next(outcomes))

    def _run_decode(
        self, spans: Sequence[RowSpan]
    ) -> list[tuple[Sequence[RowSpan], list[Sampled]]]:
        """Run all spans in one forward, or as many as may go together; if that fails, each
        alone, so that only the request at fault ends. What a failed forward wrote to blocks does
        not count, since lengths advance later; state it has changed in place, and that is
        computed anew."""
        together = [span for span in spans if not span.request.is_alone]
        size = self.config.decode_batch_size or max(1, len(together))
        groups = [together[first : first + size] for first in range(0, len(together), size)]
        groups += [[span] for span in spans if span.request.is_alone]
        outcome: list[tuple[Sequence[RowSpan], list[Sampled]]] = []
        while groups:
            group = groups.pop(0)
            try:
                outcome.append((group, self._forward_and_sample(group)))
            except Exception as failure:
                if is_device_lost(failure):
                    raise
                if len(group) == 1:
                    self._fail(group[0].request, failure)
                    continue
                self.stats = self.stats.plus(forward_retries=1)
                if self.states.is_used:
                    self.scheduler.start_over(group)
                else:
                    groups = [[span] for span in group] + groups
        return outcome

    def _forward_and_sample(self, spans: Sequence[RowSpan]) -> list[Sampled]:
        logits = self._runner.decode(spans)
        requests = [span.request for span in spans if span.reaches_end]
        if logits is None:
            return []
        return sample_rows(
            logits,
            [request.sampler for request in requests],
            [request.num_tokens for request in requests],
            [len(request.generated) for request in requests],
            self._token_bytes,
        )

    def _settle_token(self, request: Request, sampled: Sampled) -> None:
        now = self._clock()
        request.last_progress_at = now
        if request.first_token_at is None:
            request.first_token_at = now
            self._report(
                request,
                PrefillProgress(
                    stage="complete",
                    completed=request.num_prompt,
                    total=request.num_prompt,
                    detail="decode_ready",
                ),
            )
        token = sampled.token_id
        if sampled.fault is not None:
            self._fail(request, sampled.fault)
            return
        if token is None:
            request.poisoned = True
            self.cache.reject_all(request.cached)
            self._finish(
                request,
                "cancelled",
                "the model's logits were not finite; its weights or this prompt overflow",
                "non_finite_logits",
            )
            return
        self.cache.prove(request.cached)
        if request.is_end(token):
            self._finish(request, "stop")
            return
        request.generated.append(token)
        request.sampler.commit(token)
        self.stats = self.stats.plus(generated_tokens=1)
        for event in request.output.push(token, sampled.logprob):
            request.mailbox.put(event)
        if request.output.halted or request.is_complete:
            self._finish(request, "stop")
        elif len(request.generated) >= request.max_new_tokens:
            self._finish(request, "length")

    def _prefill(self, span: RowSpan | None) -> None:
        if span is None:
            return
        start = self._clock()
        self._decode_threads.use()
        try:
            self._runner.prefill(span)
        except Exception as failure:
            if is_device_lost(failure):
                raise
            self._fail(span.request, failure)
            return
        self._settle_chunk(span, self._clock() - start, is_joint=False)

    def _settle_chunk(self, span: RowSpan, took_s: float, *, is_joint: bool) -> None:
        self.scheduler.learn_chunk_time(span.count, took_s, is_joint=is_joint)
        now = self._clock()
        request = span.request
        fed = "rederived_tokens" if request.is_replay else "prefill_tokens"
        self.stats = self.stats.plus(**{fed: span.count})
        request.last_progress_at = now
        self.scheduler.fed(span)
        self._report(
            request,
            PrefillProgress(
                stage="prefill",
                completed=request.num_computed,
                total=request.num_prompt,
                detail="chunk",
            ),
        )

    def _report(self, request: Request, progress: PrefillProgress) -> None:
        """Progress belongs before the first token and never goes back, so a request that was
        preempted in its prefill is silent until it is further than it was."""
        if not request.generated and progress.completed >= request.reported_tokens:
            request.reported_tokens = progress.completed
            request.mailbox.put(progress)

    def _guarded(self, request: Request, settle: Callable[..., None], *values: object) -> None:
        try:
            settle(request, *values)
        except Exception as failure:
            if is_device_lost(failure):
                raise
            self._fail(request, failure)

    def _fail(self, request: Request, failure: Exception) -> None:
        self.stats = self.stats.plus(failed_requests=1)
        request.poisoned = True
        self.cache.reject(request.cached)
        code = failure.code if isinstance(failure, OsaurusError) else "request_failed"
        self._finish(request, "cancelled", f"{type(failure).__name__}: {failure}", code)

    def _finish(
        self,
        request: Request,
        reason: StopReason,
        error: str | None = None,
        code: str | None = None,
    ) -> None:
        """Last text, then `Info`, then the blocks: a consumer never waits for bookkeeping."""
        if request.phase is Phase.FINISHED:
            return
        try:
            for event in request.output.finish():
                request.mailbox.put(event)
        except Exception as failure:  # noqa: BLE001 - it becomes that request's error
            error = error or f"{type(failure).__name__}: {failure}"
            code = code or "request_failed"
            reason = "cancelled"
        info = request.info(self._clock(), reason, error, code)
        # Without a first token nothing has shown its keys and values finite.
        request.poisoned |= reason == "cancelled" and request.first_token_at is None
        with self._lock:
            request.phase = Phase.FINISHED
            choices = self._requests.get(request.request_id, [])
            if all(choice.phase is Phase.FINISHED for choice in choices):
                self._requests.pop(request.request_id, None)
        request.mailbox.put(info)
        try:
            self.cache.finished(request.cached, store=reason != "cancelled")
            self.scheduler.remove(request)
            if reason != "cancelled":
                self._rederiver.offer(request)
        finally:
            request.mailbox.mark_drained()
        self.stats = self.stats.plus(
            finished_requests=1, cancelled_requests=int(reason == "cancelled")
        )
        if request.num_prompt >= PURGE_PROMPT_TOKENS:
            self._steps_to_purge = 0

    def _watch(self) -> None:
        now = self._clock()
        for request in list(self.scheduler.active):
            # A choice that waits for its sibling's prefill moves when that one does.
            source = request.fork_source or request
            moved = max(request.last_progress_at, source.last_progress_at)
            if request.phase is not Phase.PREFILL and now - moved > WATCHDOG_S:
                self._fail(request, TimeoutError(f"no progress for {WATCHDOG_S:.0f} s"))

    def _maybe_purge(self) -> None:
        self._steps_to_purge -= 1
        if self._steps_to_purge <= 0:
            trim_heap(self.config.allocator_cache_bytes)
            self.pool.give_back_pages()
            self._steps_to_purge = PURGE_INTERVAL_STEPS

    def _end_everything(self, error: str | None) -> None:
        with self._lock:
            self._shutting_down = True
            self._failure = error
        try:
            self._apply_operations()
            for request in [*self.scheduler.active, *self.scheduler.waiting]:
                try:
                    self._finish(request, "cancelled", error, "engine_error" if error else None)
                except Exception:
                    # A device that is gone cannot clear blocks; every consumer still hears.
                    logger.exception("request %s: its blocks were not released", request.request_id)
            self.cache.close()
        finally:
            if not self._stopped.is_set():
                self._runner.release()
            self._stopped.set()

    def check(self) -> None:
        """Invariants that hold between steps; raises AssertionError."""
        self.scheduler.check()
