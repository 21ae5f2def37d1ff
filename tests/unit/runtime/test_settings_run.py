"""Proves of every setting that a load reads that it changes what runs, on a tiny real model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osaurus.bundle.bundle import open_bundle
from osaurus.engine.core import BatchEngine
from osaurus.errors import InsufficientResources, InvalidField, UnsupportedBundle
from osaurus.kernels import heap
from osaurus.runtime import load, plan
from osaurus.runtime.configure import check_settings, load_options
from osaurus.runtime.load import BundleSource
from osaurus.runtime.machine import Memory
from osaurus.runtime.model import LoadedModel
from osaurus.settings.load import resolve
from osaurus.settings.schema import SETTINGS
from tiny import ask, save_tiny
from unit.bundle.made import byte_level_tokenizer

#: Ids that cover two blocks and a bit.
PROMPT = [3 + i % 200 for i in range(80)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder, hidden_size=128, intermediate_size=192, num_attention_heads=4)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


Load = Callable[..., LoadedModel]


@pytest.fixture
def loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Loads the model with `key=value` settings and runs one request; gives its engine."""
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))
    with ExitStack() as stack:

        def run(settings: dict[str, Any] | None = None) -> tuple[LoadedModel, BatchEngine]:
            document: dict[str, Any] = {}
            auto = {"concurrency.maxConcurrentSequences": "auto"}
            for key, value in {**auto, **(settings or {})}.items():
                place = document
                *sections, name = key.split(".")
                for section in sections:
                    place = place.setdefault(section, {})
                place[name] = value
            source = BundleSource(load_options(resolve(document)))
            container = source.load(source.find(str(folder)))
            stack.callback(container.free)
            model = container.face(container.make_engine(source.max_batch_size))
            engine = model.engine
            assert isinstance(engine, BatchEngine)
            stack.callback(engine.shutdown)
            for stream in engine.generate(ask("r", PROMPT, max_tokens=2)):
                list(stream)
            return model, engine

        yield run


def _cached(engine: BatchEngine) -> bool:
    engine.shutdown()  # the thread has settled everything then
    return engine.pool.cached_bytes > 0


def _quota(engine: BatchEngine) -> int:
    return engine.cache_stats().disk.get("quota_bytes", 0)


#: Keys with their values beside those of the default, and what is seen on the engine.
_SEEN: list[tuple[dict[str, Any], Callable[[BatchEngine], Any], Any]] = [
    ({"concurrency.maxConcurrentSequences": 3}, lambda e: e.scheduler.max_batch_size, 3),
    ({"concurrency.continuousBatching": False}, lambda e: e.scheduler.max_batch_size, 1),
    (
        {"memorySafety.customMaxConcurrentSequences": 5},
        lambda e: e.scheduler.max_batch_size,
        5,
    ),
    ({"concurrency.prefillStepSize": 48}, lambda e: e.scheduler._chunk_limit, 48),
    # What an engine does with these is proved in unit/engine/test_idle.py.
    ({"concurrency.prefillBatchSize": 2}, lambda e: e.scheduler._prefill_batch_size, 2),
    ({"concurrency.completionBatchSize": 3}, lambda e: e.config.decode_batch_size, 3),
    ({"cache.prefix.ttlMinutes": 2}, lambda e: e.cache.config.prefix_ttl_s, 120),
    (
        {"power.autoSleepEnabled": True, "power.lightSleepAfterSeconds": 40},
        lambda e: e.config.light_sleep_s,
        40,
    ),
    ({"performance.threads": 1}, lambda e: e._threads.threads, 1),
    ({"performance.latencyBudgetMs": 7}, lambda e: e.scheduler._latency_budget_s, 0.007),
    ({"performance.maxContextTokens": 100}, lambda e: e.max_context_tokens, 100),
    ({"performance.kvBudgetMB": 1.5}, lambda e: e.pool.budget_bytes, 1_500_000),
    ({"performance.computeMode": "float32"}, lambda e: e.pool.storage[0].dtype, torch.float32),
    ({"cache.prefix.enabled": False}, _cached, False),
    ({"cache.pagedKV.enabled": False}, _cached, False),
    ({"memorySafety.mode": "strict"}, _cached, False),
    ({"memorySafety.mode": "strict", "memorySafety.slider": 0}, _cached, False),
    ({"cache.pagedKV.blockSize": 16}, lambda e: e.pool.block_tokens, 16),
    ({"cache.pagedKV.maxBlocks": 9}, lambda e: e.pool.total_blocks, 9),
    (
        {"cache.prefix.memoryLimitMB": 0.01, "performance.kvBudgetMB": 2},
        lambda e: e.pool.cached_limit_bytes,
        10_000,
    ),
    (
        {"cache.prefix.memoryPercent": 0.00001},
        lambda e: 1000 < e.pool.cached_limit_bytes < 100_000,
        True,
    ),
    ({"cache.liveKVCodec": "native"}, lambda e: e.cache_stats().kv_mode, "none"),
    ({"cache.liveKVCodec": "affine(8,32)"}, lambda e: e.cache_stats().kv_mode, "affine(8,32)"),
    (
        {
            "cache.liveKVCodec": "turboquant",
            "cache.turboQuantKeyBits": 4,
            "cache.turboQuantValueBits": 3,
        },
        lambda e: e.cache_stats().kv_mode,
        "turbo(4,3)",
    ),
    ({"cache.storedKVCodec": "disabled"}, lambda e: e.cache_stats().disk_off, "switched off"),
    ({"cache.blockDisk.enabled": False}, lambda e: e.cache_stats().disk_off, "switched off"),
    ({"cache.blockDisk.maxSizeGB": 3}, _quota, 3 * 10**9),
    ({"cache.enableSSMReDerive": False}, lambda e: e.cache.config.rederive, False),
    (
        {"memorySafety.customAllocatorCacheBytes": 10**9},
        lambda e: e.config.allocator_cache_bytes,
        10**9,
    ),
]


@pytest.mark.parametrize(("settings", "see", "seen"), _SEEN, ids=lambda value: str(value)[:50])
def test_the_engine_runs_as_the_setting_says(
    settings: dict[str, Any], see: Callable[[BatchEngine], Any], seen: Any, loaded: Any
) -> None:
    _, engine = loaded(settings)
    assert see(engine) == seen


@pytest.mark.parametrize("see", dict.fromkeys(see for _, see, _ in _SEEN), ids=str)
def test_what_is_seen_differs_without_the_setting(see: Any, loaded: Any) -> None:
    _, engine = loaded()
    found = see(engine)
    for _, other, seen in _SEEN:
        # As computed is what "the engine chooses" comes to on a model that is not proven.
        if other is see and seen != "none":
            assert found != seen


def test_a_step_runs_on_as_many_threads_as_the_setting_says(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osaurus.models import registry

    loading: list[int] = []
    original = registry.load_model

    def load_model(*arguments: Any, **options: Any) -> Any:
        loading.append(torch.get_num_threads())
        return original(*arguments, **options)

    monkeypatch.setattr(registry, "load_model", load_model)
    before = torch.get_num_threads()
    _, engine = loaded({"performance.threads": 1})
    torch.set_num_threads(before)
    assert loading == [1]
    seen: list[tuple[str, int]] = []

    def recording(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            seen.append((name, torch.get_num_threads()))
            return run(*arguments, **options)

        return recorded

    for name in ("prefill", "decode"):
        monkeypatch.setattr(engine._runner, name, recording(name, getattr(engine._runner, name)))
    for stream in engine.generate(ask("threads", [5, *PROMPT], max_tokens=3)):
        list(stream)
    assert set(seen) == {("prefill", 1), ("decode", 1)}


def test_prompts_lie_where_the_setting_says(tmp_path: Path, loaded: Any) -> None:
    _, engine = loaded({"cache.blockDisk.directory": str(tmp_path / "kv")})
    engine.shutdown()
    assert list((tmp_path / "kv").rglob("*.sqlite*")) or list((tmp_path / "kv").iterdir())
    assert not (tmp_path / "home/cache/kv").exists()


def test_a_share_of_the_volume_is_taken_as_given(loaded: Any) -> None:
    _, small = loaded({"cache.blockDisk.maxSizePercent": 0.001})
    assert 0 < _quota(small) < 10**9


def test_weights_are_quantized_as_the_setting_says(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osaurus.models import registry

    built: list[Any] = []
    original = registry.load_model

    def recording(*arguments: Any, **options: Any) -> Any:
        built.append((original(*arguments, **options), options["device"]))
        return built[-1][0]

    monkeypatch.setattr(registry, "load_model", recording)
    loaded({"performance.quantizeOnLoad": "int8"})
    loaded({"performance.device": "cpu"})
    (coded, _), (plain, device) = built
    assert coded.nbytes < 0.8 * plain.nbytes
    assert device == "cpu"


def test_the_device_is_the_one_that_was_named(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(bundle: Any, options: Any, device: str, **others: Any) -> Any:
        asked.append(device)
        raise InsufficientResources("seen")

    monkeypatch.setattr(load, "check_memory", refuse)
    monkeypatch.setattr(load, "device_memory", lambda device: None, raising=False)
    for name in ("cpu", "mps"):
        with pytest.raises(InsufficientResources):
            loaded({"performance.device": name})
    assert asked == ["cpu", "mps"]


def test_parsers_are_those_of_the_setting(loaded: Any) -> None:
    model, _ = loaded(
        {"tools.toolParserOverride": "hermes", "tools.reasoningParserOverride": "deepseek_r1"}
    )
    formats = model.conventions.formats
    assert (formats.tool_format, formats.reasoning) == ("json", "think")
    assert (formats.tool_origin, formats.reasoning_origin) == ("override", "override")
    model, _ = loaded(
        {"tools.toolParserOverride": "auto", "tools.reasoningParserOverride": "disabled"}
    )
    assert model.conventions.formats.tool_origin != "override"
    assert model.conventions.formats.reasoning is None


def test_a_template_of_the_users_own_is_rendered_and_read_for_its_formats(
    tmp_path: Path, loaded: Any
) -> None:
    def shown(model: LoadedModel) -> str:
        assert model.template is not None
        messages = [{"role": "user", "content": "hi"}]
        return model.template.render(messages, tools=None, add_generation_prompt=True)

    plain, _ = loaded()
    text = "{% for m in messages %}[{{ m.content }}]{% endfor %}<tool_call>"
    file = tmp_path / "own.jinja"
    file.write_text(text)
    for given in (text, str(file)):
        own, _ = loaded({"tools.customChatTemplate": given})
        assert (shown(plain), shown(own)) == ("hi", "[hi]<tool_call>")
    with pytest.raises(InvalidField, match="no template can be read from"):
        check_settings(resolve({"tools": {"customChatTemplate": str(tmp_path / "gone")}}))


def test_a_parser_that_nobody_knows_is_refused_before_any_load() -> None:
    for key in ("toolParserOverride", "reasoningParserOverride"):
        with pytest.raises(InvalidField, match="is not known; one of"):
            check_settings(resolve({"tools": {key: "nonsense"}}))


def test_strict_refuses_and_the_others_only_warn(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = Memory(name="host", physical_bytes=90_000_000, available_bytes=80_000_000)
    monkeypatch.setattr(plan, "host_memory", lambda: tiny)
    with pytest.raises(InsufficientResources, match=r"memorySafety\.mode strict allows 54 MB"):
        loaded({"memorySafety.mode": "strict"})
    caplog.clear()
    loaded({"memorySafety.mode": "safe_auto"})
    assert "safe_auto allows 63 MB" in caplog.text


def test_the_users_fraction_counts_instead_of_the_modes(loaded: Any) -> None:
    with pytest.raises(InsufficientResources, match="customPhysicalMemoryFraction allows"):
        loaded(
            {
                "memorySafety.mode": "strict",
                "memorySafety.customPhysicalMemoryFraction": 0.000001,
            }
        )


def test_an_unknown_size_is_refused_where_the_setting_says_so(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "read_geometry", lambda config: None)
    loaded()
    with pytest.raises(InsufficientResources, match="does not tell what it will take"):
        loaded({"memorySafety.failClosedWhenEstimateUnknown": True})


def test_an_allocator_keeps_what_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 400)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    for limit, times in ((600, 0), (None, 0), (599, 1)):
        heap.trim_heap(limit)
        assert len(emptied) == times


def test_the_plan_of_the_last_load_is_kept(folder: Path) -> None:
    source = BundleSource(load_options(resolve({})))
    assert source.last_plan is None
    container = source.load(source.find(str(folder)))
    container.free()
    assert source.last_plan is not None
    assert source.last_plan.allowed
    assert source.last_plan.is_estimated


def test_the_plan_counts_requests_context_and_numbers_as_the_settings_say(folder: Path) -> None:
    bundle = open_bundle(folder)

    def planned(requests: int = 1, **performance: Any) -> int:
        document = {
            "concurrency": {"maxConcurrentSequences": requests},
            "performance": {"kvBudgetMB": 100, **performance},
        }
        options = load_options(resolve(document))
        return plan.plan_of(bundle, options, "cpu").working_set.kv_bytes

    one = 3 * 2 * 2 * 32 * 512 * 2  # layers, keys and values, heads, their width, tokens, bytes
    assert planned() == one
    assert planned(3) == 3 * one
    assert planned(maxContextTokens=128) == one // 4
    assert planned(computeMode="float32") == 2 * one
    assert planned(3, kvBudgetMB=0.1) == 100_000


def test_every_setting_of_a_load_is_tried_here() -> None:
    text = Path(__file__).read_text()
    read_by_loads = [one for one in SETTINGS if one.is_used and one.live == "next load"]
    missing = [one.key for one in read_by_loads if one.path[-1] not in text]
    assert missing == []


def test_what_stays_loaded_counts_until_it_is_freed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"memorySafety": {"mode": "strict"}, "performance": {"kvBudgetMB": 2}}
    source = BundleSource(load_options(resolve(limits)))
    listing = source.find(str(folder))
    container = source.load(listing)
    assert source.last_plan is not None
    needed = source.last_plan.working_set.total_bytes
    small = Memory(name="host", physical_bytes=3 * needed, available_bytes=3 * needed)
    monkeypatch.setattr(plan, "host_memory", lambda: small)
    other = replace(listing, model_id="another")  # type: ignore[type-var]
    with pytest.raises(InsufficientResources, match="another needs about"):
        source.load(other)
    container.free()
    source.load(other).free()


def test_the_footprint_is_the_estimate_and_of_what_cannot_be_opened_the_files(
    folder: Path, tmp_path: Path
) -> None:
    limits = {"performance": {"kvBudgetMB": 2}}
    source = BundleSource(load_options(resolve(limits)))
    listing = source.find(str(folder))
    container = source.load(listing)
    container.free()
    assert source.last_plan is not None
    needed = source.last_plan.working_set.total_bytes
    assert source.footprint(listing) == container.footprint_bytes == needed
    assert needed > listing.size_bytes + 2_000_000
    gone = replace(listing, path=tmp_path / "gone")  # type: ignore[type-var]
    assert source.footprint(gone) == listing.size_bytes


def test_auto_runs_fewer_requests_of_a_model_that_takes_more(folder: Path) -> None:
    def bound(capacity: Any) -> int | None:
        document = {
            "concurrency": {"maxConcurrentSequences": capacity},
            "performance": {"kvBudgetMB": 1},
        }
        source = BundleSource(load_options(resolve(document)))
        container = source.load(source.find(str(folder)))
        container.free()
        return container.max_batch_size

    assert bound("auto") == 1_000_000 // (3 * 2 * 2 * 32 * 512 * 2)
    assert bound(8) is None


def test_a_manifest_that_comes_later_counts_for_models_that_are_loaded(
    folder: Path, loaded: Any
) -> None:
    model, _ = loaded()
    model.admit()
    manifest = folder / "osaurus.json"
    manifest.write_text('{"required_osaurus_version": "99.0.0", "model_version": "1"}')
    try:
        with pytest.raises(UnsupportedBundle, match=r"needs osaurus 99\.0\.0"):
            model.admit()
    finally:
        manifest.unlink()
