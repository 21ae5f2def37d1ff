"""The engine of embedding models: no company, whole jobs, turns on the device, an end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_embedders
from osaurus.bundle.bundle import open_bundle
from osaurus.bundle.embedding import EmbeddingSpec
from osaurus.engine.embedding import TURN_TOKENS, EmbeddingEngine
from osaurus.errors import Cancelled, EngineShutdown, RequestFailed
from osaurus.models.embedding import TextEncoder, load_encoder
from osaurus.runtime.gate import DeviceGate
from tiny import ask


class Slow:
    """A stand-in encoder that waits for the test before each forward."""

    vocab_size, hidden_size, max_tokens = 100, 4, 64
    nbytes = 0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.lengths: list[list[int]] = []
        self.fails: Exception | None = None

    def encode(self, token_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        self.lengths.append(list(lengths))
        self.begun.release()
        assert self.go.acquire(timeout=10)
        if self.fails is not None:
            raise self.fails
        return token_ids.float().unsqueeze(1).repeat(1, 4)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def start() -> Iterator[Callable[..., EmbeddingEngine]]:
    engines: list[EmbeddingEngine] = []

    def make(encoder: TextEncoder, **fields: Any) -> EmbeddingEngine:
        engines.append(EmbeddingEngine(encoder, EmbeddingSpec(is_normalized=False), **fields))
        return engines[-1]

    yield make
    for engine in engines:
        if isinstance(encoder := engine._encoder, Slow):
            encoder.go.release(100)
        engine.shutdown()


@pytest.mark.parametrize("family", ["bert", "mpnet", "qwen3"])
def test_a_texts_vector_is_the_same_in_any_company_to_the_bit(tmp_path: Path, family: str) -> None:
    save = tiny_embedders.save_decoder if family == "qwen3" else tiny_embedders.save_encoder
    save(tmp_path, family)
    bundle = open_bundle(tmp_path)
    assert bundle.embedding_spec is not None
    engine = EmbeddingEngine(load_encoder(bundle, compute_mode="float32"), bundle.embedding_spec)
    order = random.Random(7)
    texts = [[order.randrange(320) for _ in range(order.randint(1, 64))] for _ in range(40)]
    texts[5] = texts[11]
    try:
        alone = [engine.start([text]).done.result(60)[0] for text in texts]
        assert alone[5] == alone[11]
        for _ in range(6):
            chosen = order.sample(range(len(texts)), order.randint(2, len(texts)))
            found = engine.start([texts[i] for i in chosen]).done.result(60)
            assert found == [alone[i] for i in chosen]
    finally:
        engine.shutdown()


def test_texts_of_one_turn_are_computed_together_and_come_back_in_order(
    slow: Slow, start: Callable[..., EmbeddingEngine]
) -> None:
    slow.go.release(100)
    texts = [[5] * 30, [7], [9] * 30, [11, 13]]
    found = start(slow).start(texts).done.result(10)
    assert [vector[0] for vector in found] == [5, 7, 9, 12]
    assert slow.lengths == [[1, 2, 30, 30]], "one forward, texts of one length side by side"


def test_a_turn_is_bounded_and_others_use_the_device_between_two(
    slow: Slow, start: Callable[..., EmbeddingEngine]
) -> None:
    gate = DeviceGate()
    engine = start(slow, seat=gate.seat("embedding"))
    job = engine.start([[1] * 60 for _ in range(20)])
    assert slow.begun.acquire(timeout=10)
    assert gate.owner == "embedding"
    turn = threading.Event()
    ticket = gate.enter("gen:other", turn.set)
    slow.go.release()
    assert turn.wait(10), "the other model's step comes before the job's next turn"
    assert not slow.begun.acquire(timeout=0.05)
    gate.leave(ticket)
    slow.go.release(100)
    assert len(job.done.result(10)) == 20
    assert len(slow.lengths) == 3
    assert all(sum(lengths) <= TURN_TOKENS for lengths in slow.lengths)
    assert gate.owner is None


def test_a_cancelled_job_stops_before_its_next_turn_and_the_next_job_runs(
    slow: Slow, start: Callable[..., EmbeddingEngine]
) -> None:
    engine = start(slow)
    first, second = engine.start([[1] * 60] * 20), engine.start([[2]])
    assert slow.begun.acquire(timeout=10)
    first.cancel()
    slow.go.release(100)
    with pytest.raises(Cancelled):
        first.done.result(10)
    assert second.done.result(10)[0][0] == 2
    assert slow.lengths == [[60] * 8, [1]]


def test_a_job_that_waits_for_the_device_can_be_cancelled(
    slow: Slow, start: Callable[..., EmbeddingEngine]
) -> None:
    gate = DeviceGate()
    ticket = gate.enter("gen:other", lambda: None)
    job = start(slow, seat=gate.seat("embedding")).start([[1]])
    job.cancel()
    with pytest.raises(Cancelled):
        job.done.result(10)
    gate.leave(ticket)
    assert slow.lengths == []


def test_a_failure_ends_its_own_job_alone(
    slow: Slow, start: Callable[..., EmbeddingEngine]
) -> None:
    engine = start(slow)
    slow.fails = ValueError("a shape that does not fit")
    slow.go.release()
    with pytest.raises(RequestFailed, match="ValueError"):
        engine.start([[1]]).done.result(10)
    slow.fails = None
    slow.go.release()
    assert engine.start([[3]]).done.result(10)[0][0] == 3
    assert engine.capacity_snapshot().failure is None


def test_a_lost_device_ends_the_engine_with_its_reason(
    slow: Slow, start: Callable[..., EmbeddingEngine]
) -> None:
    engine = start(slow)
    slow.fails = RuntimeError("CUDA error: device-side assert triggered")
    slow.go.release()
    with pytest.raises(RequestFailed):
        engine.start([[1]]).done.result(10)
    with pytest.raises(EngineShutdown):
        engine.start([[1]]).done.result(10)
    snapshot = engine.capacity_snapshot()
    assert snapshot.is_shutdown
    assert "CUDA error" in (snapshot.failure or "")


def test_a_vector_that_is_not_finite_is_an_error(
    slow: Slow, start: Callable[..., EmbeddingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = torch.full((1, 4), torch.nan)
    monkeypatch.setattr(slow, "encode", lambda ids, lengths: nan)
    with pytest.raises(RequestFailed, match="finite"):
        start(slow).start([[1]]).done.result(10)


def test_a_shutdown_ends_what_runs_and_what_waits(
    slow: Slow, start: Callable[..., EmbeddingEngine]
) -> None:
    engine = start(slow)
    running, waiting = engine.start([[1] * 60] * 20), engine.start([[2]])
    assert slow.begun.acquire(timeout=10)
    stopper = threading.Thread(target=engine.shutdown)
    stopper.start()
    with pytest.raises(EngineShutdown):
        engine_start_when_down(engine)
    slow.go.release()
    for job in (running, waiting):
        with pytest.raises(EngineShutdown):
            job.done.result(10)
    stopper.join(10)
    assert not stopper.is_alive()
    engine.shutdown()  # a second time changes nothing


def engine_start_when_down(engine: EmbeddingEngine) -> None:
    while not engine.capacity_snapshot().is_shutdown:
        pass
    engine.start([[3]]).done.result(10)


def test_a_prompt_for_such_an_engine_ends_with_the_reason(
    slow: Slow, start: Callable[..., EmbeddingEngine]
) -> None:
    (stream,) = start(slow, name="made").generate(ask("r", [1, 2]))
    (info,) = list(stream)
    assert info.error == "made makes embeddings and writes no text"
