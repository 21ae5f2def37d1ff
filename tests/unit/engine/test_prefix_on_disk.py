"""Claim: whatever happens to the files, an answer is the right one and the reason is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from osaurus.engine.core import BatchEngine
from osaurus.models.base import Model
from osaurus.types.cache import CacheConfig, CacheStats
from osaurus.types.engine import EngineConfig
from osaurus.types.events import Info, PrefillProgress
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

PROMPT = list(range(3, 303))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1)
    return path


@pytest.fixture
def model(folder: Path) -> Model:
    return load_tiny(folder)


class Life:
    """One process's engine over a directory."""

    def __init__(self, model: Model, disk_dir: Path | None, identity: str = "tiny@1") -> None:
        self.engine = BatchEngine(
            model,
            EngineConfig(kv_block_tokens=8, cache=CacheConfig(disk_dir=disk_dir)),
            token_bytes=TokenText().token_bytes,
            identity=identity,
            start=False,
        )
        self.events: list[object] = []

    def answer(self, prompt: list[int]) -> tuple[list[int], Info]:
        (stream,) = self.engine.generate(ask("r", prompt, max_tokens=12))
        while not stream._mailbox.completed:  # type: ignore[attr-defined]
            self.engine.step()
            self.engine.check()
        events = list(stream)
        self.events = list(events)
        return tokens_of(events), info_of(events)

    def stats(self) -> CacheStats:
        return self.engine.cache_stats()

    def end(self) -> None:
        self.engine.shutdown()


@pytest.fixture
def expected(model: Model) -> list[int]:
    life = Life(model, None)
    answer, _ = life.answer(PROMPT)
    life.end()
    return answer


@pytest.fixture
def stored(model: Model, tmp_path: Path) -> Path:
    """A directory that a process which is gone has filled with PROMPT's records."""
    directory = tmp_path / "kv"
    life = Life(model, directory)
    life.answer(PROMPT)
    life.end()
    assert list(directory.glob("*.safetensors"))
    return directory


def test_the_first_request_after_a_restart_reads_its_prefix(
    model: Model, stored: Path, expected: list[int]
) -> None:
    life = Life(model, stored)
    answer, info = life.answer(PROMPT)
    assert answer == expected
    assert info.cache_detail == "disk"
    assert info.cached_prompt_tokens == 296
    assert life.engine.stats.prefill_tokens == 3
    stages = [e.stage for e in life.events if isinstance(e, PrefillProgress)]
    assert stages[-1] == "complete"
    _, again = life.answer(PROMPT)
    assert again.cache_detail == "paged"
    assert (life.stats().disk_hits, life.stats().memory_hits) == (1, 1)
    life.end()


def test_the_time_of_reading_from_disk_is_a_part_of_the_prompts(model: Model, stored: Path) -> None:
    life = Life(model, stored)
    _, info = life.answer(PROMPT)
    assert info.cache_detail == "disk"
    assert 0 < info.restore_time_s < info.prompt_time_s
    life.end()


def test_another_model_finds_nothing(model: Model, stored: Path, expected: list[int]) -> None:
    life = Life(model, stored, identity="tiny@2")
    answer, info = life.answer(PROMPT)
    assert (answer, info.cached_prompt_tokens) == (expected, 0)
    life.end()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def _absurd_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "flipped": _flip,
    "header": _absurd_header,
    "gone": Path.unlink,
    "empty": _empty,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("seed", range(3))
def test_damage_costs_tokens_but_never_an_answer(
    model: Model, stored: Path, expected: list[int], damage: str, seed: int
) -> None:
    files = sorted(stored.glob("*.safetensors"))
    victims = random.Random(seed).sample(files, 1 + seed % len(files))
    for path in victims:
        DAMAGES[damage](path)
    life = Life(model, stored)
    answer, info = life.answer(PROMPT)
    assert answer == expected
    assert info.error is None
    assert info.cached_prompt_tokens < 296 or len(files) > len(victims)
    again, repeated = life.answer(PROMPT)
    assert (again, repeated.cached_prompt_tokens) == (expected, 296)
    life.end()


def test_damage_that_only_reading_shows_is_counted(model: Model, stored: Path) -> None:
    for path in stored.glob("*.safetensors"):
        _flip(path)
    life = Life(model, stored)
    _, info = life.answer(PROMPT)
    assert info.cached_prompt_tokens == 0
    assert life.stats().disk["corruptions"] >= 1
    life.end()


def test_a_directory_that_cannot_be_written_is_a_reason_and_no_error(
    model: Model, tmp_path: Path, expected: list[int]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    life = Life(model, blocked / "kv")
    answer, info = life.answer(PROMPT)
    assert (answer, info.error) == (expected, None)
    assert life.stats().disk_off
    life.end()


def test_blocks_wait_for_the_writer_only_as_long_as_nobody_needs_them(
    model: Model, tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(model, tmp_path / "kv")
    assert life.engine.cache.disk is not None
    monkeypatch.setattr(life.engine.cache.disk, "has_room", lambda nbytes: False)
    life.answer(PROMPT)
    assert life.engine.pool.used_bytes > 0, "runs wait for a writer that is busy"
    assert life.engine.cache.drop_pending()
    assert life.engine.pool.used_bytes == 0
    assert life.stats().stores_dropped > 0
    assert life.answer(PROMPT)[0] == expected
    life.end()
