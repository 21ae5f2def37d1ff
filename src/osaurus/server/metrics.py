"""`GET /metrics`: counters, gauges and histograms in Prometheus' text format.

Names are those of vLLM with another prefix (`vllm:` -> `osaurus:`), so that a dashboard is
ported by one replacement; labels too. Gauges are read from the runtime when they are asked for.
Times are seconds of one process's monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from osaurus import __version__
from osaurus.runtime.blocking import on_thread
from osaurus.runtime.pool import ModelRuntime, ResidentModel
from osaurus.server.limits import Admission
from osaurus.types.events import Chunk, Info, Reasoning, RuntimeEvent, ToolInvocation

_PREFIX = "osaurus:"
_MODEL = ("model_name",)

_FIRST_TOKEN_S = (
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """One server's. Everything but `generate_latest` runs on the event loop."""

    def __init__(self, runtime: ModelRuntime, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        self._runtime = runtime
        self._gauges = _Gauges(admission)
        self.registry.register(self._gauges)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.success = self._counter(
            "request_success", "Answers that ended, by why.", (*_MODEL, "finished_reason")
        )
        self.malformed = self._counter(
            "parser_malformed", "Answers with a tool call that could not be read."
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first output.", _FIRST_TOKEN_S
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between two pieces of output.", _BETWEEN_TOKENS_S
        )
        self.request_time = self._histogram(
            "e2e_request_latency_seconds", "From the request to its end.", _REQUEST_S
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Waiting for a slot.", _REQUEST_S
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the slot to the first token.", _REQUEST_S
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", _TOKENS
        )
        self.answer_length = self._histogram(
            "request_generation_tokens", "Tokens of an answer.", _TOKENS
        )
        self.http = Counter(
            "http_requests",
            "HTTP requests by route, method and status.",
            ("handler", "method", "status"),
            registry=self.registry,
        )

    def observe(self, model_id: str, started_s: float) -> _Answer:
        return _Answer(self, model_id, started_s)

    def count_http(self, handler: str, method: str, status: int) -> None:
        self.http.labels(handler, method, str(status)).inc()

    async def show(self, request: Request) -> Response:
        self._gauges.rows = self._runtime.resident()
        # Engines answer under their locks: not on the event loop.
        text = await on_thread(lambda: generate_latest(self.registry))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _counter(self, name: str, what: str, labels: tuple[str, ...] = _MODEL) -> Counter:
        return Counter(_PREFIX + name, what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, what, _MODEL, buckets=buckets, registry=self.registry)


class _Answer:
    """Implements `chat.observer.AnswerObserver`."""

    def __init__(self, metrics: Metrics, model_id: str, started_s: float) -> None:
        self._metrics = metrics
        self._model = model_id
        self._started_s = started_s
        self._last_s: dict[int, float] = {}  # of each choice's output
        self._between = metrics.between_tokens.labels(model_id)
        self._ended: set[int] = set()
        self._is_closed = False

    def event(self, index: int, event: RuntimeEvent) -> None:
        if isinstance(event, Chunk | Reasoning | ToolInvocation):
            now = time.monotonic()
            last = self._last_s.get(index)
            if last is not None:
                self._between.observe(now - last)
            elif not self._last_s:
                self._metrics.first_token.labels(self._model).observe(now - self._started_s)
            self._last_s[index] = now
        elif isinstance(event, Info):
            self._end(index, event)

    def closed(self) -> None:
        if not self._is_closed and not self._ended:
            self._metrics.success.labels(self._model, "abort").inc()
        self._is_closed = True

    def _end(self, index: int, info: Info) -> None:
        metrics, model = self._metrics, self._model
        if not self._ended:  # the choices of a request share its prompt
            metrics.prompt_tokens.labels(model).inc(info.prompt_tokens)
            metrics.prompt_length.labels(model).observe(info.prompt_tokens)
            metrics.queue_time.labels(model).observe(info.queue_time_s)
            metrics.prefill_time.labels(model).observe(info.prompt_time_s)
        self._ended.add(index)
        reason = "error" if info.error is not None else _REASONS[info.stop_reason]
        metrics.success.labels(model, reason).inc()
        metrics.generation_tokens.labels(model).inc(info.generated_tokens)
        metrics.answer_length.labels(model).observe(info.generated_tokens)
        metrics.decode_time.labels(model).observe(info.generate_time_s)
        metrics.request_time.labels(model).observe(time.monotonic() - self._started_s)
        if info.tool_call_protocol_failure:
            metrics.malformed.labels(model).inc()


_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}


class _Gauges(Collector):
    """What engines hold now, and the sums that they keep themselves, of `rows`."""

    def __init__(self, admission: Admission) -> None:
        self.rows: Sequence[ResidentModel] = ()
        self._admission = admission

    def describe(self) -> Iterator[Metric]:
        return iter(())  # no scrape while registering

    def collect(self) -> Iterator[Metric]:
        running = _gauge("num_requests_running", "Requests that decode or are read.")
        waiting = _gauge("num_requests_waiting", "Requests that wait for a slot.")
        usage = _gauge("kv_cache_usage_perc", "Share of the key and value blocks in use, 0 to 1.")
        resident = _gauge("resident_bytes", "Bytes of a loaded model's weights.")
        queries = _total("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        hits = _total("prefix_cache_hits", "Prompt tokens found there.")
        for row in self.rows:
            name = [row.model.model_id]
            capacity = row.model.engine.capacity_snapshot()
            cache = row.model.engine.cache_stats()
            running.add_metric(name, capacity.active_count)
            waiting.add_metric(name, capacity.pending_count)
            used = capacity.kv_blocks_total - capacity.kv_blocks_free
            usage.add_metric(name, used / max(1, capacity.kv_blocks_total))
            resident.add_metric(name, row.model.size_bytes)
            queries.add_metric(name, cache.prompt_tokens)
            hits.add_metric(name, cache.hit_tokens)
        yield from (running, waiting, usage, resident, queries, hits)
        inflight = GaugeMetricFamily(
            _PREFIX + "http_inference_inflight", "Inference requests that run or wait."
        )
        inflight.add_metric([], self._admission.active)
        yield inflight
        build = GaugeMetricFamily(_PREFIX + "build_info", "1.", labels=("version",))
        build.add_metric([__version__], 1)
        yield build


def _gauge(name: str, what: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, what, labels=_MODEL)


def _total(name: str, what: str) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, what, labels=_MODEL)
