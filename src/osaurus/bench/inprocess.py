"""Drive an engine through its public face, without HTTP or text, and time every token.

In: anything that implements `types.engine.Engine`. Tokens are stamped on the engine's own
thread by the request's output pipeline, so no consumer's delay is measured. A run counts only
when it did the whole work: all tokens, nothing from a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from osaurus.bench.workloads import DidNotRun, Sample, Workload, shared_decode_rate
from osaurus.types.engine import Engine, GenerationRequest
from osaurus.types.events import Event, Info, TokenLogprob
from osaurus.types.sampling import SamplingParams


class StampedOutput:
    """An output pipeline that emits nothing and notes when each token was settled."""

    halted = False
    stop_string: str | None = None
    unclosed_reasoning = False
    reasoning_tokens = 0
    tool_call_protocol_failure = False

    def __init__(self) -> None:
        self.times: list[float] = []

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> list[Event]:
        self.times.append(time.perf_counter())
        return []

    def finish(self) -> list[Event]:
        return []


class EngineRunner:
    """Runs workloads on one engine, whose cache is its own: it is emptied before each run."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self._engine = engine
        self._count = 0

    def run_once(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Sample:
        """One run from an empty cache. Raises `DidNotRun` when it was not the described work."""
        self._engine.clear_cache()
        outputs: list[StampedOutput] = []
        requests = [self._request(workload, prompt, outputs) for prompt in prompts]
        started = time.perf_counter()
        streams = [stream for request in requests for stream in self._engine.generate(request)]
        for stream in streams:
            _check_ran(_last_info(list(stream)), workload)
        ttft_s = max(output.times[0] for output in outputs) - started
        if workload.kind == "prefill":
            rate = workload.prompt_tokens / ttft_s
        else:
            rate = shared_decode_rate([output.times for output in outputs])
        return Sample(ttft_s=ttft_s, tokens_per_s=rate)

    def _request(
        self, workload: Workload, prompt: Sequence[int], outputs: list[StampedOutput]
    ) -> GenerationRequest:
        self._count += 1
        return GenerationRequest(
            request_id=f"bench-{self._count}",
            token_ids=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=workload.new_tokens, ignore_eos=True),
            make_output=_recorder(outputs),
        )


def _recorder(outputs: list[StampedOutput]) -> Callable[[], StampedOutput]:
    def make() -> StampedOutput:
        outputs.append(StampedOutput())
        return outputs[-1]

    return make


def _last_info(events: Sequence[Event]) -> Info:
    if not events or not isinstance(events[-1], Info):
        raise DidNotRun("the engine ended a stream without its info")
    return events[-1]


def _check_ran(info: Info, workload: Workload) -> None:
    if info.error:
        raise DidNotRun(f"a request failed: {info.error}")
    if info.generated_tokens != workload.new_tokens:
        raise DidNotRun(
            f"{info.generated_tokens} of {workload.new_tokens} tokens came ({info.stop_reason})"
        )
    if info.cached_prompt_tokens:
        raise DidNotRun(f"{info.cached_prompt_tokens} prompt tokens came from a cache")
