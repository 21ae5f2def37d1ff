"""Claims about models of the transformers route, by family, on small random weights in float32.

Greedy tokens and logits are those of transformers' own forward and `generate`: alone, in
company, with prompts cut at odd places, and resumed from a prefix. `docs/models.md` is made
from these tests by `scripts/models_table`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from osaurus.engine import core
from osaurus.engine.core import BatchEngine
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, save_tiny, tokens_of
from transformers_families import MADE, load_routed, refusal

LENGTHS = (70, 33, 1, 49)
COUNT = 32


@pytest.fixture(scope="module", params=MADE)
def saved(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Any]:
    """A folder and the transformers model that wrote it; skipped where the installed version
    has none or the route refuses it, with the reason."""
    folder = tmp_path_factory.mktemp("family")
    reason = refusal(folder, request.param)
    if reason:
        pytest.skip(f"transformers {transformers.__version__}: {reason}")
    reference = save_tiny(folder, **MADE[request.param])
    # Its other kernels leave caps out that the config asks for.
    reference.set_attn_implementation("eager")
    return folder, reference


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """The logits of every sampled row, by the request's seed."""
    kept: dict[str, list[torch.Tensor]] = {}
    original = core.sample_rows

    def spy(logits: torch.Tensor, samplers: Any, *rest: Any) -> Any:
        for sampler, row in zip(samplers, logits, strict=True):
            kept.setdefault(str(sampler.seed), []).append(row.clone())
        return original(logits, samplers, *rest)

    monkeypatch.setattr(core, "sample_rows", spy)
    return kept


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 320, (n,), generator=generator).tolist() for n in LENGTHS]


def _engine(model: Any, chunk: int) -> BatchEngine:
    return BatchEngine(
        model,
        EngineConfig(
            kv_block_tokens=8,
            prefill_chunk_tokens=chunk,
            max_batch_size=4,
            kv_budget_bytes=1 << 27,
            cache=CacheConfig(snapshot_interval=24),
        ),
        token_bytes=TokenText().token_bytes,
        start=False,
    )


def _run(engine: BatchEngine, prompts: dict[int, list[int]]) -> dict[int, Any]:
    """Answers by seed: (tokens, info) of greedy requests that run together."""
    streams = {
        seed: engine.generate(ask(f"r{seed}", prompt, max_tokens=COUNT, seed=seed))[0]
        for seed, prompt in prompts.items()
    }
    while not all(stream._mailbox.completed for stream in streams.values()):  # type: ignore[attr-defined]
        engine.step()
        engine.check()
    events = {seed: list(stream) for seed, stream in streams.items()}
    return {seed: (tokens_of(found), info_of(found)) for seed, found in events.items()}


def _agrees(reference: Any, prompt: list[int], tokens: list[int], got: list[Any]) -> None:
    """Teacher forcing on our own tokens: each must be the reference's choice at its place,
    which by induction makes the whole answer its greedy answer."""
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    expected = logits[len(prompt) - 1 : -1].float()
    assert len(tokens) == COUNT
    relative = (torch.stack(got) - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(relative.max()) < 1e-3
    assert tokens == expected.argmax(-1).tolist()


def _generated(reference: Any, prompt: list[int]) -> list[int]:
    """What transformers' own generate says."""
    with torch.no_grad():
        ids = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


def test_float32_answers_are_those_of_transformers(saved: Any, rows: Any) -> None:
    folder, reference = saved
    prompts = _prompts()
    alone = _engine(load_routed(folder), 512)
    answers = _run(alone, {0: prompts[0]})
    alone.shutdown()
    _agrees(reference, prompts[0], answers[0][0], rows["0"])
    assert answers[0][0] == _generated(reference, prompts[0])

    together = _engine(load_routed(folder), 37)
    answers = _run(together, dict(enumerate(prompts, start=1)))
    for seed, (tokens, _) in answers.items():
        _agrees(reference, prompts[seed - 1], tokens, rows[str(seed)])

    follow_up = prompts[0] + answers[1][0] + [5, 6, 7]
    tokens, info = _run(together, {9: follow_up})[9]
    together.shutdown()
    assert info.cached_prompt_tokens >= 64
    _agrees(reference, follow_up, tokens, rows["9"])
