"""Claim: on a CUDA device prefixes come back from memory and disk, and coded blocks are read,
with the tokens of a cold request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.engine.core import BatchEngine
from osaurus.models.base import Model
from osaurus.types.cache import CacheConfig, KVMode
from osaurus.types.engine import EngineConfig
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT = [3 + (7 * i) % 290 for i in range(230)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "llama", head_dim=32)
    return load_tiny(path, "float32", "cuda")


def answer(model: Model, directory: Path | None, mode: str, turns: int) -> list[tuple[Any, Any]]:
    engine = BatchEngine(
        model,
        EngineConfig(
            kv_block_tokens=16,
            kv_budget_bytes=32 << 20,
            cache=CacheConfig(disk_dir=directory, kv_mode=KVMode.parse(mode)),
        ),
        token_bytes=TokenText().token_bytes,
        identity="tiny@1",
        start=False,
    )
    heard: list[tuple[Any, Any]] = []
    for turn in range(turns):
        (stream,) = engine.generate(ask(f"r{turn}", PROMPT, max_tokens=50))
        while not stream._mailbox.completed or engine.cache.has_work:  # type: ignore[attr-defined]
            engine.step()
            engine.check()
        events = list(stream)
        heard.append((tokens_of(events), info_of(events)))
    engine.shutdown()
    return heard


@pytest.mark.parametrize("mode", ["none", "turbo(3,3)", "affine(8,32)"])
def test_hits_answer_as_a_cold_request(model: Model, mode: str, tmp_path: Path) -> None:
    ((cold, info),) = answer(model, None, mode, 1)
    assert info.error is None
    first, second = answer(model, tmp_path, mode, 2)
    assert (first[0], second[0]) == (cold, cold)
    assert second[1].cached_prompt_tokens == 224
    ((after, restored),) = answer(model, tmp_path, mode, 1)
    assert after == cold
    assert (restored.cache_detail, restored.cached_prompt_tokens) == ("disk", 224)
