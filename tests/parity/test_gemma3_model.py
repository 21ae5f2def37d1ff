"""Claim about the real Gemma 3 270M: in float32 it computes what transformers computes from the
same dequantized file, for prompts on both sides of its sliding window's edge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.bundle.bundle import Bundle, open_bundle
from osaurus.bundle.hub import find_model
from osaurus.engine import core
from osaurus.engine.core import BatchEngine
from osaurus.errors import ModelNotFound
from osaurus.models.base import Model
from osaurus.models.registry import load_model
from osaurus.types.engine import EngineConfig
from tiny import ask, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: The window is 512 tokens.
LENGTHS = (100, 511, 512, 513, 2000)
COUNT = 32


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    try:
        listing = find_model("gemma3-270m")
    except ModelNotFound as error:
        pytest.skip(f"{error.message}; to run this: osaurus pull gemma3-270m")
    return open_bundle(listing.path, listing.model_id)


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> Model:
    return load_model(bundle, compute_mode="float32")


@pytest.fixture(scope="module")
def oracle(bundle: Bundle) -> Any:
    """transformers' own reading of the same file, dequantized to float32."""
    import transformers

    path = Path(bundle.path)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def text(bundle: Bundle) -> list[int]:
    """A long English text: this repository's pages."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    words = "\n\n".join(page.read_text() for page in pages)
    return bundle.load_tokenizer().encode(words[:40_000], parse_special=False)


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_and_logits_are_those_of_transformers(
    model: Model, oracle: Any, text: list[int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[torch.Tensor] = []
    original = core.sample_rows

    def spy(logits: torch.Tensor, *rest: Any) -> Any:
        rows.append(logits[0].clone())
        return original(logits, *rest)

    monkeypatch.setattr(core, "sample_rows", spy)
    engine = BatchEngine(model, EngineConfig(prefill_chunk_tokens=300), token_bytes=lambda _: b"")
    prompt = [2, *text[: length - 1]]
    tokens = tokens_of(list(engine.generate(ask("r", prompt, max_tokens=COUNT))[0]))
    engine.shutdown()
    assert len(prompt) == length
    assert len(tokens) == COUNT
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens]), logits_to_keep=COUNT + 1).logits[0]
    expected, got = logits[:-1], torch.stack(rows)
    relative = (got - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(relative.max()) < 1e-3
    assert tokens == expected.argmax(-1).tolist()
