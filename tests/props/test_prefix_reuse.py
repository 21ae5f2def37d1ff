"""Claim: an answer is the same with every prefix that the cache holds as without a cache.

Conversations grow, branch, are edited, run side by side, are cancelled and are preempted, in
pools so small that blocks and snapshots are evicted under them, for every kind of memory.
float32, where P3 of the design says that everything is equal; in bfloat16 for what prefill
made.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from osaurus.engine.core import BatchEngine
from osaurus.models.base import Model
from osaurus.types.cache import CacheConfig
from osaurus.types.engine import EngineConfig
from synthetic import FAMILIES
from synthetic import build as build_synthetic
from tiny import TokenText, ask, info_of, load_tiny, save_tiny, tokens_of

KINDS: dict[str, dict[str, Any]] = {
    "full": {"family": "llama"},
    "window": {"family": "mistral", "head_dim": 16, "sliding_window": 40},
    "mixed": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
}


#: Kinds of memory that the above do not have; their conversations are had once a claim.
OTHERS = [family for family in FAMILIES if family not in ("full", "window_mix")]


def kinds_and_seeds(seeds: int) -> pytest.MarkDecorator:
    pairs = [(kind, seed) for kind in KINDS for seed in range(seeds)]
    return pytest.mark.parametrize(("kind", "seed"), [*pairs, *((kind, 0) for kind in OTHERS)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind's model."""
    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            save_tiny(folders[kind], **KINDS[kind])
        return folders[kind]

    return folder_of


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Path:
    return saved(request.param)


@pytest.fixture
def model(kind: str, saved: Callable[[str], Path]) -> Model:
    return build_synthetic(kind) if kind in OTHERS else load_tiny(saved(kind))


def engine_of(model: Model, cache: CacheConfig, **settings: Any) -> BatchEngine:
    identity = settings.pop("identity", None)
    given = {"kv_block_tokens": 8, "prefill_chunk_tokens": 32, "max_batch_size": 3, **settings}
    return BatchEngine(
        model,
        EngineConfig(**given, cache=cache),
        token_bytes=TokenText().token_bytes,
        identity=identity,
        start=False,
    )


def drain(engine: BatchEngine, streams: list[Any]) -> None:
    while not all(stream._mailbox.completed for stream in streams):
        engine.step()
        engine.check()


def cold_answers(model: Model, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    """Without a cache, answers to prompts of so many tokens, side by side to save time."""
    engine = engine_of(model, CacheConfig(use_paged_cache="off"), max_batch_size=16)
    streams = [
        engine.generate(ask(f"cold{i}", prompt, max_tokens=count))[0]
        for i, (prompt, count) in enumerate(asked)
    ]
    drain(engine, streams)
    answers = [tokens_of(list(stream)) for stream in streams]
    engine.shutdown()
    return answers


def cold_answer(model: Model, prompt: list[int], count: int) -> list[int]:
    return cold_answers(model, [(prompt, count)])[0]


class Talk:
    """Random prompts that share prefixes with earlier ones and their answers; remembers all
    that was said."""

    def __init__(self, model: Model, seed: int, longest: int = 150) -> None:
        self.rng = random.Random(seed)
        self.longest = longest
        self._model = model
        self.histories: list[list[int]] = [self._words(50)]
        self._asked: list[tuple[list[int], int]] = []
        self._answers: list[list[int]] = []

    def _word(self) -> int:
        return self.rng.randrange(3, min(300, self._model.vocab_size))

    def _words(self, count: int) -> list[int]:
        return [self._word() for _ in range(count)]

    def prompt(self) -> list[int]:
        base = list(self.rng.choice(self.histories))
        if self.rng.random() < 0.4:
            base = base[: self.rng.randrange(1, len(base) + 1)]
        if self.rng.random() < 0.2:
            base[self.rng.randrange(len(base))] = self._word()
        base += self._words(self.rng.randrange(0, 25))
        return base[: self.longest]

    def heard(self, prompt: list[int], count: int, answer: list[int]) -> None:
        self.histories = [*self.histories[-6:], prompt + answer]
        self._asked.append((prompt, count))
        self._answers.append(answer)

    def check(self) -> None:
        """What was said is what is said without a cache."""
        cold = cold_answers(self._model, self._asked)
        assert self._answers == cold


@kinds_and_seeds(3)
@pytest.mark.parametrize("blocks", [None, 55], ids=["room", "tight"])
def test_conversations_answer_as_without_a_cache(
    model: Model, kind: str, seed: int, blocks: int | None
) -> None:
    settings: dict[str, Any] = {}
    config = CacheConfig(snapshot_interval=24)
    if blocks is not None:
        config = CacheConfig(snapshot_interval=24, recurrent_entries=8)
        settings["max_context_tokens"] = 200
        probe = engine_of(model, config, **settings)
        settings["kv_budget_bytes"] = (
            blocks * sum(probe.pool.block_bytes) + probe.states.reserved_bytes
        )
        probe.shutdown()
    engine, talk = engine_of(model, config, **settings), Talk(model, seed)
    hits = 0
    for turn in range(8 if kind in OTHERS else 12):
        prompts = [talk.prompt() for _ in range(talk.rng.choice([1, 1, 2, 3, 4]))]
        counts = [talk.rng.randrange(1, 30) for _ in prompts]
        streams = [
            engine.generate(ask(f"{turn}.{i}", prompt, max_tokens=count))[0]
            for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]
        dropped = talk.rng.randrange(len(streams)) if talk.rng.random() < 0.2 else None
        for _ in range(talk.rng.randrange(6)):
            engine.step()
            engine.check()
        if dropped is not None:
            streams[dropped].close()
        drain(engine, streams)
        for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            if i == dropped:
                continue
            events = list(stream)
            hits += info_of(events).cached_prompt_tokens
            talk.heard(prompt, counts[i], tokens_of(events))
    talk.check()
    assert hits > 100
    assert engine.pool.used_bytes == 0
    engine.shutdown()


def test_what_prefill_made_is_exact_in_the_shipped_mode(folder: Path) -> None:
    model = load_tiny(folder, "bfloat16")
    engine = engine_of(model, CacheConfig(reuse_generated=False))
    talk, hits = Talk(model, 5), 0
    for turn in range(25):
        prompt = talk.prompt()
        (stream,) = engine.generate(ask(f"{turn}", prompt, max_tokens=12))
        drain(engine, [stream])
        events = list(stream)
        hits += info_of(events).cached_prompt_tokens
        talk.heard(prompt, 12, tokens_of(events))
    talk.check()
    assert hits > 200
    engine.shutdown()


def test_equal_prompts_that_run_together_are_prefilled_once(folder: Path) -> None:
    model = load_tiny(folder)
    engine = engine_of(model, CacheConfig())
    prompt = list(range(3, 163))
    streams = [engine.generate(ask(f"r{i}", prompt, max_tokens=3))[0] for i in range(3)]
    drain(engine, streams)
    answers = [tokens_of(list(stream)) for stream in streams]
    assert answers == [cold_answer(model, prompt, 3)] * 3
    assert engine.stats.prefill_tokens < 1.2 * len(prompt)
    engine.shutdown()


def test_a_follow_up_reuses_the_answer_of_the_turn_before(folder: Path) -> None:
    model = load_tiny(folder)
    engine = engine_of(model, CacheConfig())
    prompt = list(range(3, 73))
    (first,) = engine.generate(ask("one", prompt, max_tokens=40))
    drain(engine, [first])
    longer = prompt + tokens_of(list(first)) + [9, 8, 7]
    (second,) = engine.generate(ask("two", longer, max_tokens=10))
    drain(engine, [second])
    events = list(second)
    assert info_of(events).cached_prompt_tokens >= 104
    assert info_of(events).cache_detail == "paged"
    assert tokens_of(events) == cold_answer(model, longer, 10)
    engine.shutdown()


def test_a_preempted_request_takes_its_own_blocks_back(folder: Path) -> None:
    model = load_tiny(folder)
    engine = engine_of(model, CacheConfig())
    prompt = list(range(3, 53))
    (stream,) = engine.generate(ask("r", prompt, max_tokens=60))
    while not engine.scheduler.active or len(engine.scheduler.active[0].generated) < 40:
        engine.step()
    fed = engine.stats.decode_rows
    engine.scheduler.preempt(engine.scheduler.active[0])
    engine.step()
    assert engine.scheduler.active[0].num_computed >= 80
    drain(engine, [stream])
    assert tokens_of(list(stream)) == cold_answer(model, prompt, 60)
    assert engine.stats.decode_rows - fed < 40
    engine.shutdown()


def test_salts_keep_prefixes_apart(folder: Path) -> None:
    from dataclasses import replace

    from osaurus.types.cache import CacheHints

    engine = engine_of(load_tiny(folder), CacheConfig())
    prompt = list(range(3, 73))
    cached: list[int] = []
    hints = [CacheHints(), CacheHints(scope_salt="reasoning=off"), CacheHints(media_salt=b"x")]
    for turn, hint in enumerate([*hints, *hints]):
        request = replace(ask(f"{turn}", prompt, max_tokens=1), cache=hint)
        (stream,) = engine.generate(request)
        drain(engine, [stream])
        cached.append(info_of(list(stream)).cached_prompt_tokens)
    assert cached == [0, 0, 0, 64, 64, 64]
    engine.shutdown()


@kinds_and_seeds(2)
def test_conversations_go_on_after_a_restart(
    model: Model, kind: str, seed: int, tmp_path: Path
) -> None:
    talk = Talk(model, seed + 10)
    config = CacheConfig(disk_dir=tmp_path, snapshot_interval=24)
    restored = 0
    for life in range(3 if kind in OTHERS else 5):
        engine = engine_of(model, config, identity="tiny@1")
        for turn in range(4):
            prompts = [talk.prompt() for _ in range(talk.rng.choice([1, 2]))]
            streams = [
                engine.generate(ask(f"{life}.{turn}.{i}", prompt, max_tokens=20))[0]
                for i, prompt in enumerate(prompts)
            ]
            drain(engine, streams)
            for prompt, stream in zip(prompts, streams, strict=True):
                events = list(stream)
                restored += info_of(events).cache_detail == "disk"
                talk.heard(prompt, 20, tokens_of(events))
        engine.shutdown()
    talk.check()
    assert restored > 0


@kinds_and_seeds(1)
def test_two_engines_share_a_directory(model: Model, kind: str, seed: int, tmp_path: Path) -> None:
    talk = Talk(model, seed + 77)
    config = CacheConfig(disk_dir=tmp_path, snapshot_interval=24)
    engines = [engine_of(model, config, identity="tiny@1") for _ in range(2)]
    restored = 0
    for turn in range(16):
        engine, prompt = engines[turn % 2], talk.prompt()
        (stream,) = engine.generate(ask(f"{turn}", prompt, max_tokens=20))
        drain(engine, [stream])
        while engine.cache.has_work:
            engine.step()
        assert engine.cache.disk is not None
        assert engine.cache.disk.flush(10)
        events = list(stream)
        restored += info_of(events).cache_detail == "disk"
        talk.heard(prompt, 20, tokens_of(events))
    talk.check()
    assert restored > (0 if kind in OTHERS else 2)
    for engine in engines:
        engine.shutdown()
