"""Claims about the real default model.

float32: greedy tokens and logits are those of transformers on the dequantized weights.
Shipped mode: a request's logits are bit for bit the same alone and in company, whatever
happens to its neighbours; starting and cancelling leaks nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from osaurus.bundle.bundle import Bundle
from osaurus.engine import core
from osaurus.engine.core import BatchEngine
from osaurus.kernels.heap import trim_heap
from osaurus.kernels.openmp import release_team
from osaurus.models.base import Model
from osaurus.types.engine import EngineConfig
from tiny import Recorder, ask, info_of, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "Explain what a prime number is.",
    "Translate 'good morning' into French.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Write a Python function that adds two numbers.",
    "What is 12 times 7?",
    "Name three planets.",
    "Tell me a short story about a fox.",
    "Why is the sky blue?",
    "List the months of the year.",
    "What does HTTP stand for?",
    "Summarise: The cat sat on the mat. The dog barked. The cat ran away.",
    "Was sind die Farben des Regenbogens?",
    "Write a haiku about winter.",
    "How do I boil an egg?",
    "What is the largest mammal?",
    "{'key': [1, 2, 3]} is valid in which language?",
]


def _prompt(bundle: Bundle, question: str) -> list[int]:
    text = bundle.load_template().render(  # type: ignore[union-attr]
        [{"role": "user", "content": question}], tools=None, add_generation_prompt=True
    )
    return bundle.load_tokenizer().encode(text, parse_special=True)


@pytest.fixture(scope="module")
def oracle(default_bundle: Bundle) -> Any:
    """transformers' own reading of the same file, dequantized to float32."""
    import transformers

    path = Path(default_bundle.path)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


class _LogitsTap:
    """Keeps the logits of every sampled row, by request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, list[torch.Tensor]] = {}
        original = core.sample_rows

        def spy(logits: torch.Tensor, samplers: Any, *rest: Any) -> Any:
            for sampler, row in zip(samplers, logits, strict=True):
                self.rows.setdefault(str(sampler.seed), []).append(row.clone())
            return original(logits, samplers, *rest)

        monkeypatch.setattr(core, "sample_rows", spy)


def test_float32_greedy_tokens_and_logits_equal_those_of_transformers(
    default_bundle: Bundle,
    default_model_float32: Model,
    oracle: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tap = _LogitsTap(monkeypatch)
    release_team()  # reading the oracle's weights left one on this thread
    engine = BatchEngine(
        default_model_float32, EngineConfig(prefill_chunk_tokens=48), token_bytes=lambda _: b""
    )
    prompts = [_prompt(default_bundle, question) for question in QUESTIONS]
    streams = [
        engine.generate(ask(f"q{i}", prompt, max_tokens=64, seed=i))[0]
        for i, prompt in enumerate(prompts)
    ]
    ours = [tokens_of(list(stream)) for stream in streams]
    engine.shutdown()
    for i, (prompt, tokens) in enumerate(zip(prompts, ours, strict=True)):
        assert len(tokens) == 64
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0]
        # Teacher forcing on our own tokens: each must be the oracle's choice at its place,
        # which by induction makes the whole answer the oracle's greedy answer.
        expected = logits[len(prompt) - 1 : -1]
        got = torch.stack(tap.rows[str(i)])
        assert tokens == expected.argmax(-1).tolist(), QUESTIONS[i]
        relative = (got - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert float(relative.max()) < 1e-3, QUESTIONS[i]


KINDS: list[dict[str, Any]] = [
    dict(temperature=0.0, seed=100),
    dict(temperature=1.0, seed=101),
    dict(temperature=0.7, top_p=0.9, seed=102),
    dict(temperature=1.2, top_k=20, seed=103),
    dict(temperature=0.0, repetition_penalty=1.2, seed=104),
    dict(temperature=0.9, min_p=0.05, frequency_penalty=0.5, seed=105),
    dict(temperature=0.0, presence_penalty=1.0, logit_bias={260: 4.0}, seed=106),
    dict(temperature=0.8, top_k=50, top_p=0.95, seed=107),
]
LENGTHS = [40, 9, 25, 33, 17, 48, 30, 21]


def _workload(bundle: Bundle) -> list[list[int]]:
    prompts = [_prompt(bundle, question) for question in QUESTIONS[:8]]
    # One long enough for several chunks, one of a single token, one past a block boundary.
    prompts[2] = prompts[2][:-5] + _prompt(bundle, QUESTIONS[10]) * 30 + prompts[2][-5:]
    prompts[5] = [prompts[5][0]]
    prompts[6] = (prompts[6] * 3)[:65]
    return prompts


@pytest.fixture(scope="module")
def alone(default_bundle: Bundle, default_model: Model) -> Iterator[list[tuple[Any, Any]]]:
    """Every request of the workload in an engine of its own: its tokens and logits."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        results = []
        for i, prompt in enumerate(_workload(default_bundle)):
            tap = _LogitsTap(monkeypatch)
            engine = BatchEngine(default_model, token_bytes=lambda _: b"")
            (stream,) = engine.generate(ask("r", prompt, max_tokens=LENGTHS[i], **KINDS[i]))
            tokens = tokens_of(list(stream))
            engine.shutdown()
            results.append((tokens, tap.rows[str(KINDS[i]["seed"])]))
            monkeypatch.undo()
        yield results


def test_eight_requests_together_have_the_logits_they_have_alone(
    default_bundle: Bundle,
    default_engine: BatchEngine,
    alone: list[tuple[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tap = _LogitsTap(monkeypatch)
    streams = [
        default_engine.generate(ask(f"r{i}", prompt, max_tokens=LENGTHS[i], **KINDS[i]))[0]
        for i, prompt in enumerate(_workload(default_bundle))
    ]
    for i, stream in enumerate(streams):
        assert tokens_of(list(stream)) == alone[i][0], KINDS[i]
        rows = tap.rows[str(KINDS[i]["seed"])]
        assert all(torch.equal(a, b) for a, b in zip(rows, alone[i][1], strict=True)), KINDS[i]
    assert default_engine.capacity_snapshot().active_count_high_watermark == 8


@pytest.mark.parametrize("victim", range(8))
def test_cancelling_any_of_them_changes_nothing_for_the_rest(
    default_bundle: Bundle,
    default_model: Model,
    alone: list[tuple[Any, Any]],
    victim: int,
) -> None:
    engine = BatchEngine(default_model, token_bytes=lambda _: b"", start=False)
    streams = [
        engine.generate(ask(f"r{i}", prompt, max_tokens=LENGTHS[i], **KINDS[i]))[0]
        for i, prompt in enumerate(_workload(default_bundle))
    ]
    for _ in range(victim * 2):
        engine.step()
    streams[victim].close()
    while not all(stream._mailbox.completed for stream in streams):  # type: ignore[attr-defined]
        engine.step()
    for i, stream in enumerate(streams):
        if i != victim:
            assert tokens_of(list(stream)) == alone[i][0], (victim, i)
    engine.check()
    assert engine.pool.used_bytes == 0
    engine.shutdown()


def test_chunk_sizes_do_not_change_a_bit(
    default_bundle: Bundle, default_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits(prompt: list[int], chunk: int) -> torch.Tensor:
        with monkeypatch.context() as patch:
            tap = _LogitsTap(patch)
            engine = BatchEngine(
                default_model,
                EngineConfig(prefill_chunk_tokens=chunk),
                token_bytes=lambda _: b"",
            )
            list(engine.generate(ask("r", prompt, max_tokens=3, seed=1))[0])
            engine.shutdown()
        return torch.stack(tap.rows["1"])

    story = _prompt(default_bundle, QUESTIONS[10]) * 30
    for prompt, chunks in ((story[:1100], (64, 100, 700)), (story[:70], (1, 2, 23))):
        whole = logits(prompt, 512)
        for chunk in chunks:
            assert torch.equal(logits(prompt, chunk), whole), chunk


def test_five_hundred_starts_and_cancels_leave_nothing_behind(
    default_bundle: Bundle, default_engine: BatchEngine
) -> None:
    prompts = _workload(default_bundle)
    process = psutil.Process()

    def cycle(turn: int) -> None:
        (stream,) = default_engine.generate(
            ask(f"r{turn}", prompts[turn % 8], max_tokens=50, **KINDS[turn % 8])
        )
        events = iter(stream)
        for _ in range(turn % 4):
            next(events)
        if turn % 2:
            default_engine.cancel(f"r{turn}")
            info_of(list(events))
        else:
            stream.close()
        stream._mailbox.drained.wait(timeout=60)  # type: ignore[attr-defined]
        assert stream._mailbox.drained.is_set()  # type: ignore[attr-defined]

    def resident() -> int:
        gc.collect()
        trim_heap()
        return process.memory_info().rss

    for turn in range(50):
        cycle(turn)
    threads, after_fifty = threading.active_count(), resident()
    for turn in range(50, 500):
        cycle(turn)
    assert default_engine.pool.used_bytes == 0
    assert threading.active_count() == threads
    assert abs(resident() - after_fifty) < 20e6
    assert not default_engine._requests


def test_a_recorder_sees_each_generated_token_once(
    default_bundle: Bundle, default_engine: BatchEngine
) -> None:
    recorders: list[Recorder] = []

    def make() -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    prompt = _prompt(default_bundle, QUESTIONS[0])
    (stream,) = default_engine.generate(
        ask("r", prompt, stop=default_bundle.eos_token_ids, make_output=make, max_tokens=60)
    )
    info = info_of(list(stream))
    assert info.stop_reason == "stop"
    assert info.generated_tokens == len(recorders[0].tokens)
    assert "Paris" in default_bundle.load_tokenizer().decode(recorders[0].tokens)
