"""Claim: what goes wrong in a step ends the requests of that step with an error that they see; what
goes wrong with the device ends the engine, which says why, so that another can be built."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.engine.core import BatchEngine
from osaurus.engine.device import is_device_lost
from osaurus.errors import EngineShutdown
from osaurus.models.base import ForwardBatch, ForwardOutput, Model
from osaurus.runtime.gate import DeviceGate
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

PROMPT = [3 + (7 * i) % 290 for i in range(20)]
LOST = RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = tmp_path_factory.mktemp("model")
    save_tiny(path, "llama")
    return load_tiny(path)


class _Failing:
    """A model whose forward raises what `fault` gives, when it gives something."""

    def __init__(self, inner: Model, fault: Callable[[ForwardBatch], Exception | None]) -> None:
        self._inner, self._fault = inner, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: ForwardBatch, kv: Any) -> ForwardOutput:
        error = self._fault(batch)
        if error is not None:
            raise error
        return self._inner.forward(batch, kv)


def _engine(model: Any, **options: Any) -> BatchEngine:
    config = EngineConfig(kv_block_tokens=8)
    return BatchEngine(model, config, token_bytes=TokenText().token_bytes, **options)


def _events(engine: BatchEngine, name: str = "r", count: int = 6) -> list[Any]:
    (stream,) = engine.generate(ask(name, PROMPT, max_tokens=count))
    return list(stream)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (LOST, True),
        (RuntimeError("HIP error: invalid device"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError("CUDA error: only a word of a user's"), False),
    ],
)
def test_only_an_error_of_the_device_means_that_it_is_gone(error: Exception, is_lost: bool) -> None:
    assert is_device_lost(error) is is_lost


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_fault_in_a_forward_ends_its_request_and_the_engine_goes_on(
    model: Model, phase: str
) -> None:
    faults = [RuntimeError("shape [3, 4]")]

    def fault(batch: ForwardBatch) -> Exception | None:
        is_decode = batch.num_small > 0
        return faults.pop() if faults and is_decode == (phase == "decode") else None

    engine = _engine(_Failing(model, fault))
    info = info_of(_events(engine, "first"))
    assert info.stop_reason == "cancelled"
    assert "shape [3, 4]" in (info.error or "")
    assert info.error_code == "request_failed"
    assert len(tokens_of(_events(engine, "second"))) == 6
    assert engine.capacity_snapshot().failure is None
    engine.shutdown()
    engine.check()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_lost_device_ends_every_request_and_the_engine_with_the_reason(
    model: Model, phase: str
) -> None:
    begun = threading.Event()

    def fault(batch: ForwardBatch) -> Exception | None:
        is_decode = batch.num_small > 0
        if is_decode != (phase == "decode"):
            return None
        assert begun.wait(10)
        return LOST

    engine = _engine(_Failing(model, fault))
    streams = [s for i in range(3) for s in engine.generate(ask(f"r{i}", PROMPT, max_tokens=6))]
    begun.set()
    for stream in streams:
        info = info_of(list(stream))
        assert info.error_code == "engine_error"
        assert "illegal memory access" in (info.error or "")
    engine.shutdown()
    capacity = engine.capacity_snapshot()
    assert capacity.is_shutdown
    assert "illegal memory access" in (capacity.failure or "")
    assert info_of(_events(engine, "late")).stop_reason == "cancelled"
    with pytest.raises(EngineShutdown):
        engine.update_max_batch_size(2)
    again = _engine(model)
    assert len(tokens_of(_events(again))) == 6
    again.shutdown()


def test_a_fault_between_requests_ends_the_engine_too(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(model)

    def fail() -> None:
        raise RuntimeError("the books do not balance")

    monkeypatch.setattr(engine, "_watch", fail)
    info = info_of(_events(engine))
    assert info.error_code == "engine_error"
    engine.shutdown()
    assert "books" in (engine.capacity_snapshot().failure or "")


def test_a_stopped_engine_holds_no_weights(model: Model) -> None:
    engine = _engine(model)
    _events(engine)
    engine.shutdown()
    engine.shutdown()
    assert not hasattr(engine._runner, "_model")


def test_a_cancel_is_settled_while_the_device_is_someone_elses(model: Model) -> None:
    gate = DeviceGate()
    engine = _engine(model, seat=gate.seat("gen:m"))
    with gate.hold("load:other"):
        (stream,) = engine.generate(ask("r", PROMPT, max_tokens=6))
        pause = threading.Event()
        while not gate.waiting:
            pause.wait(0.005)
        assert engine.cancel("r")
        assert info_of(list(stream)).stop_reason == "cancelled"
        assert gate.waiting == ("gen:m",)
        engine.shutdown()  # does not wait for the load either
        assert gate.waiting == ()
    assert gate.owner is None


def test_a_running_engine_says_how_fast_it_is(model: Model) -> None:
    now_s = 0.0
    engine = _engine(model, start=False, clock=lambda: now_s)
    assert engine.capacity_snapshot().tokens_per_second is None
    (stream,) = engine.generate(ask("r", PROMPT, max_tokens=60))
    for _ in range(50):
        engine.step()
        now_s += 0.05
    assert engine.capacity_snapshot().tokens_per_second == pytest.approx(20, rel=0.1)
    now_s += 10
    assert engine.capacity_snapshot().tokens_per_second == 0
    engine.cancel("r")
    engine.step()
    assert info_of(list(stream)).stop_reason == "cancelled"
    engine.shutdown()
