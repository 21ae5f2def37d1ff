"""A prompt that the memory for keys and values can never hold, as clients see it (field case
F31), on a small real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.engine import EngineConfig
from tiny import save_tiny
from unit.bundle.made import byte_level_tokenizer


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a server whose model has a context of 512 tokens and memory for 320."""
    folder = tmp_path / "tiny"
    backend = byte_level_tokenizer()
    save_tiny(folder, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    engine = EngineConfig(kv_budget_bytes=128_000)
    options = LoadOptions(device="cpu", disk_cache=False, engine=engine)
    source = BundleSource(options, allow_paths=True)
    with running_server(source, ServerConfig(port=0, drain_s=0.2, preload=str(folder))) as url:
        yield url


def _ask(url: str, length: int, **fields: object) -> httpx2.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a" * length}], **fields}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_what_can_never_fit_is_a_503_with_figures_and_others_go_on(url: str) -> None:
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(_ask, url, 30, max_tokens=200, stream=True) for _ in range(2)]
        for stream in (False, True):
            refused = _ask(url, 450, max_tokens=16, stream=stream)
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("insufficient_resources",) * 2
            # The prompt and room for one token.
            assert "451 tokens need 0.2 MB of keys and values" in error["message"]
            assert "hold 320; shorten the messages or raise perf" in error["message"]
        assert _ask(url, 600, max_tokens=16).status_code == 400
        for answer in running:
            assert answer.result().text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.result().text


@pytest.mark.parametrize("max_tokens", [16, 256, 8192, 32000])
def test_a_small_prompt_is_admitted_however_much_it_asks_for(url: str, max_tokens: int) -> None:
    answer = _ask(url, 30, max_tokens=max_tokens, ignore_eos=True)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
