"""The engine of a model that makes vectors: jobs in order, each in turns on the device.

A turn takes texts of like lengths, up to `TURN_TOKENS` in one forward without padding, so that
streams of other models wait for one turn, never for a whole job. A text's vector does not depend
on what shares its turn. One thread; callers wait on futures.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future

import torch

from osaurus.bundle.embedding import EmbeddingSpec
from osaurus.engine.device import OwnDevice, is_device_lost
from osaurus.errors import Cancelled, EngineShutdown, OsaurusError, RequestFailed
from osaurus.kernels.cpu_topology import choose_threads, stay_on
from osaurus.kernels.openmp import release_team
from osaurus.models.embedding import TextEncoder, vector_of
from osaurus.types.cache import CacheStats
from osaurus.types.engine import CapacitySnapshot, DeviceSeat, EventStream, GenerationRequest
from osaurus.types.events import Event, Info

logger = logging.getLogger(__name__)

#: Tokens of one turn; a longer text takes one alone.
TURN_TOKENS = 512


class EmbeddingEngine:
    """Implements `types.embeddings.Embedder`, and `types.engine.Engine` as far as the runtime
    needs it to keep the model: it completes no prompt."""

    def __init__(
        self,
        encoder: TextEncoder,
        spec: EmbeddingSpec,
        *,
        frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        seat: DeviceSeat | None = None,
        name: str = "model",
        threads: int | None = None,
    ) -> None:
        self.dimensions = encoder.hidden_size
        self.vocab_size = encoder.vocab_size
        self.max_tokens = min(encoder.max_tokens, spec.max_tokens or encoder.max_tokens)
        self.max_context_tokens = self.max_tokens
        self.frame = frame
        self._encoder: TextEncoder | None = encoder
        self._spec = spec
        self._name = name
        self._seat = seat or OwnDevice()
        self._threads = choose_threads(threads)
        self._max_batch_size = 1
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._is_shut_down = False
        self._failure: str | None = None
        self._most_active = 0
        self._thread = threading.Thread(target=self._run, name=f"osaurus-embed-{name}", daemon=True)
        self._thread.start()

    def start(self, inputs: Sequence[Sequence[int]]) -> _Job:
        job = _Job(inputs, self._seat.nudge)
        with self._changed:
            if self._is_shut_down:
                job.fail(EngineShutdown(f"{self._name} was unloaded"))
            else:
                self._jobs.append(job)
                self._changed.notify()
        return job

    # The engine's thread.

    def _run(self) -> None:
        stay_on(self._threads.keep_to)
        torch.set_num_threads(self._threads.threads)
        while (job := self._next()) is not None:
            try:
                vectors = self._compute(job)
            except Exception as error:  # noqa: BLE001 - the job's own future carries it
                self._note_failure(error)
                job.fail(_told(error))
            else:
                job.done.set_result(vectors)
            with self._changed:
                self._running = None
                is_idle = not self._jobs
            if is_idle:
                release_team()
        with self._changed:
            left = list(self._jobs)
            self._jobs.clear()
        for job in left:
            job.fail(EngineShutdown(f"{self._name} was unloaded"))

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_shut_down)
            if self._is_shut_down:
                return None
            self._running = self._jobs.popleft()
            self._most_active = 1
            return self._running

    def _compute(self, job: _Job) -> list[array[float]]:
        vectors: dict[int, array[float]] = {}
        left = deque(sorted(range(len(job.inputs)), key=lambda i: len(job.inputs[i])))
        while left:
            with self._seat.hold(lambda: not self._is_over(job)) as is_held:
                self._check(job)
                if not is_held:
                    continue
                turn = _next_turn(job.inputs, left)
                found = self._vectors([job.inputs[i] for i in turn])
                vectors.update(zip(turn, found, strict=True))
        return [vectors[i] for i in range(len(job.inputs))]

    def _vectors(self, texts: Sequence[Sequence[int]]) -> list[array[float]]:
        encoder, spec = self._encoder, self._spec
        assert encoder is not None  # it is let go when this thread has ended
        lengths = [len(ids) for ids in texts]
        ids = torch.tensor([i for text in texts for i in text], device=encoder.device)
        with torch.inference_mode():
            hidden = encoder.encode(ids, lengths).split(lengths)
            stacked = torch.stack(
                [vector_of(h, spec.pooling, is_normalized=spec.is_normalized) for h in hidden]
            ).cpu()
        if not stacked.isfinite().all():
            raise RequestFailed("the model gave a vector with numbers that are not finite")
        return [array("f", row.numpy().tobytes()) for row in stacked]

    def _is_over(self, job: _Job) -> bool:
        return job.is_cancelled or self._is_shut_down

    def _check(self, job: _Job) -> None:
        if self._is_shut_down:
            raise EngineShutdown(f"{self._name} was unloaded before its vectors were done")
        if job.is_cancelled:
            raise Cancelled("the request was cancelled")

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, OsaurusError):
            return
        logger.error("%s: embedding failed", self._name, exc_info=error)
        if is_device_lost(error):
            with self._changed:
                self._failure = f"{type(error).__name__}: {error}"
                self._is_shut_down = True

    # What the runtime sees.

    def refusal(self, prompt_tokens: int) -> OsaurusError | None:
        return None  # whoever embeds looks at the lengths of its texts

    def generate(self, request: GenerationRequest) -> list[EventStream]:
        return [_Refusal(request, self._name) for _ in range(request.n)]

    def cancel(self, request_id: str) -> bool:
        return False

    def update_max_batch_size(self, n: int) -> None:
        """Texts are computed one at a time: the number is only kept."""
        with self._changed:
            if self._is_shut_down:
                raise EngineShutdown(f"{self._name} was unloaded")
            self._max_batch_size = n

    def capacity_snapshot(self) -> CapacitySnapshot:
        with self._changed:
            return CapacitySnapshot(
                configured_maximum=self._max_batch_size,
                active_count=int(self._running is not None),
                pending_count=len(self._jobs),
                active_count_high_watermark=self._most_active,
                is_accepting_requests=not self._is_shut_down,
                is_shutdown=self._is_shut_down,
                failure=self._failure,
            )

    def cache_stats(self) -> CacheStats:
        return CacheStats()

    def clear_cache(self) -> None:
        """Nothing is kept between texts."""

    def shutdown(self) -> None:
        with self._changed:
            self._is_shut_down = True
            self._changed.notify_all()
        self._seat.nudge()
        self._thread.join()
        self._encoder = None


class _Job:
    """Implements `types.embeddings.EmbeddingJob`."""

    def __init__(self, inputs: Sequence[Sequence[int]], nudge: Callable[[], object]) -> None:
        self.inputs = inputs
        self.is_cancelled = False
        self.done: Future[list[array[float]]] = Future()
        self.done.set_running_or_notify_cancel()  # whoever stops waiting stops nothing by that
        self._nudge = nudge

    def cancel(self) -> None:
        self.is_cancelled = True
        self._nudge()

    def fail(self, error: OsaurusError) -> None:
        self.done.set_exception(error)


class _Refusal:
    """The stream of a prompt that reached an engine which completes none."""

    def __init__(self, request: GenerationRequest, name: str) -> None:
        self.request_id = request.request_id
        self._events: list[Event] = [
            Info(
                prompt_tokens=len(request.token_ids),
                stop_reason="cancelled",
                error=f"{name} makes embeddings and writes no text",
                error_code=RequestFailed.code,
            )
        ]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._events:
            yield event

    def close(self) -> None:
        self._events = []

    async def drained(self) -> None:
        await asyncio.sleep(0)


def _next_turn(inputs: Sequence[Sequence[int]], left: deque[int]) -> list[int]:
    """Take from `left`, whose texts grow longer, what one turn holds: at least one."""
    turn: list[int] = []
    num_tokens = 0
    while left and (not turn or num_tokens + len(inputs[left[0]]) <= TURN_TOKENS):
        num_tokens += len(inputs[left[0]])
        turn.append(left.popleft())
    return turn


def _told(error: Exception) -> OsaurusError:
    if isinstance(error, OsaurusError):
        return error
    return RequestFailed(f"the model failed: {type(error).__name__}")
