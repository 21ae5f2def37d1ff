"""The prefix cache as clients meet it, with the real model: counts, restarts, clearing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 30}
LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};\n"


@contextmanager
def _server(disk_dir: Path | None) -> Iterator[str]:
    engine = EngineConfig(
        max_batch_size=2,
        kv_budget_bytes=256 * 1024 * 1024,
        cache=CacheConfig(disk_dir=disk_dir),
    )
    options = LoadOptions(device="cpu", engine=engine, disk_cache=disk_dir is not None)
    config = ServerConfig(port=0, drain_s=0.2, preload="default")
    with running_server(BundleSource(options), config) as url:
        yield url


def _ask(url: str, *messages: dict[str, str], **fields: Any) -> tuple[str, int, int]:
    """The answer, its prompt's length and how much of that came from the cache."""
    body = {"model": "default", "messages": list(messages), "temperature": 0, "max_tokens": 6}
    answer = httpx2.post(f"{url}/v1/chat/completions", json={**body, **fields}, timeout=500).json()
    usage = answer["usage"]
    return (
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def _stats(url: str) -> dict[str, Any]:
    (row,) = httpx2.get(f"{url}/admin/cache-stats", timeout=60).json()["models"]
    return row


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_prompt_is_read_once_and_found_again_after_a_restart(tmp_path: Path) -> None:
    question = _user("What is the capital of France?")
    with _server(tmp_path) as url:
        cold = _ask(url, SYSTEM, question)
        again = _ask(url, SYSTEM, question)
        row = _stats(url)
    assert cold[2] == 0
    assert again[:2] == cold[:2]
    assert cold[1] - 64 <= again[2] < cold[1]
    assert row["paged_cache"]["hits"] == 1
    assert "@" in row["stats"]["model_key"]
    with _server(tmp_path) as url:
        restored = _ask(url, SYSTEM, question)
        row = _stats(url)
        assert httpx2.post(f"{url}/admin/cache/clear", timeout=60).status_code == 200
        cleared = _ask(url, SYSTEM, question)
    assert restored[:2] == cleared[:2] == cold[:2]
    assert restored[2] > 0
    assert row["block_disk_store"]["hits"] == 1
    assert cleared[2] == 0


def test_what_a_prompts_cache_is_shared_with() -> None:
    with _server(None) as url:
        first = _ask(url, SYSTEM, _user("Name a fruit."), enable_thinking=False)
        assert _stats(url)["block_disk_store"]["enabled"] is False
        other_user = _ask(url, SYSTEM, _user("Name a tree."), enable_thinking=False)
        other_scope = _ask(url, SYSTEM, _user("Name a fruit."), enable_thinking=True)
        several = _ask(url, SYSTEM, _user("Name a fruit."), enable_thinking=False, n=2)
        lines = [
            _ask(url, {**SYSTEM, "content": LINE.format(word) + SYSTEM["content"]}, _user("Hi."))
            for word in ("00001", "abcde")
        ]
    assert first[2] == other_scope[2] == 0
    assert 0 < other_user[2] < other_user[1]
    assert 0 < several[2] < several[1]
    assert lines[1][2] > lines[1][1] - 64
