"""Faults that the original once had, by number, and the tests that keep them away; and, for those
that are about the server as a whole, the tests themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.conftest import Start
from api.scripted_engine import Say
from osaurus.runtime.live import LiveSettings
from osaurus.runtime.load import BundleSource, LoadOptions
from osaurus.server.serve import ServerConfig, running_server
from osaurus.settings.store import SettingsStore
from osaurus.types.engine import EngineConfig
from tiny import save_tiny
from unit.bundle.made import byte_level_tokenizer

TESTS = Path(__file__).resolve().parents[1]
HI = [{"role": "user", "content": "hi"}]

#: Number and symptom to the tests; a text without `::` says why there is none.
FAULTS: dict[str, tuple[str, ...]] = {
    "1 a closed window freed weights in use": (
        "unit/runtime/test_pool.py::test_unloading_waits_for_the_lease_and_then_stops_the_engine",
        "unit/runtime/test_interleavings.py::test_ten_thousand_orders_of_events",
    ),
    "2 loading B killed A's reply": (
        "api/test_residency.py::test_another_model_waits_for_the_stream_that_runs",
    ),
    "3 two first requests built two engines": (
        "unit/runtime/test_registry.py::test_five_first_callers_cause_one_engine",
        "unit/runtime/test_pool.py::test_many_first_callers_cause_one_load",
    ),
    "4 a fetch that raced a teardown got the dying engine": (
        (
            "unit/runtime/test_registry.py::"
            "test_a_caller_that_meets_a_teardown_waits_and_gets_another_engine"
        ),
    ),
    "5 two removers shut an engine down twice": (
        (
            "unit/runtime/test_pool.py::"
            "test_two_unloads_stop_the_engine_once_and_only_one_says_it_was_there"
        ),
    ),
    "6 resizing a dead engine looped for ever": (
        (
            "unit/runtime/test_registry.py::"
            "test_a_dead_engine_is_replaced_at_the_size_that_was_asked_for"
        ),
        "unit/runtime/test_registry.py::test_engines_that_die_as_they_are_built_are_given_up_on",
    ),
    "7 a changed batch size waited for a reload": (
        "api/test_settings.py::test_the_batch_size_changes_with_the_next_request_and_no_load",
        "unit/settings/test_store.py::test_the_retired_key_is_imported_once_and_never_again",
    ),
    "8 the slider moved nothing": (
        "unit/settings/test_load.py::test_the_slider_is_the_mode",
        "unit/settings/test_render.py::test_memory_and_residency_are_told",
    ),
    "9 the user's sampling was inert": (
        "api/test_settings.py::test_sampling_is_the_requests_then_the_users_then_the_bundles",
    ),
    "10 defaults came from another folder of the same name": (
        "api/test_old_faults.py::test_defaults_are_those_of_the_folder_that_was_opened",
    ),
    "11 a filter of sentinels dropped the thinking": (
        "unit/runtime/test_mapper.py::test_events_pass_unchanged_and_info_comes_last",
    ),
    "12 thinking first kept the spinner": (
        "unit/runtime/test_mapper.py::test_progress_after_the_first_output_of_any_kind_is_dropped",
    ),
    "13 length stops were said to be stops": (
        "api/test_old_faults.py::test_a_cut_answer_says_so_in_every_protocol",
    ),
    "14 a hang-up kept decoding": (
        "api/test_hang_up.py::test_a_client_that_goes_away_cancels_its_request",
        "api/test_hang_up.py::test_others_go_on_when_a_client_goes_away",
    ),
    "15 a hang-up in a cold load left the model": (
        "api/test_hang_up.py::test_a_client_that_goes_away_while_its_model_loads_leaves_no_model",
    ),
    "16 two cold loads both passed the memory gate": (
        "unit/runtime/test_many_models.py::test_bytes_are_reserved_before_anything_else_can_happen",
        (
            "unit/runtime/test_many_models.py::"
            "test_what_a_model_will_take_is_reserved_and_not_only_what_is_stored"
        ),
    ),
    "17 a half-downloaded bundle ended the process": (
        "unit/bundle/test_weights.py::test_f33b_an_absent_shard_is_named",
        "api/test_default_model_fails.py::test_the_server_starts_says_why_and_serves_the_others",
    ),
    "18 strict never refused a real load": (
        "api/test_old_faults.py::test_strict_refuses_a_real_load_and_records_it",
    ),
    "19 safe_auto refused what runs": (
        "unit/runtime/test_settings_run.py::test_strict_refuses_and_the_others_only_warn",
    ),
    "20 an allocator's pool of nothing": (
        (
            "unit/runtime/test_memory.py::"
            "test_the_allocators_cache_never_shrinks_below_a_steps_scratch"
        ),
    ),
    "21 an idle timer met a newer decision": (
        "unit/runtime/test_residency.py::test_an_old_decision_cannot_cancel_a_newer_one",
        "unit/runtime/test_residency.py::test_use_in_the_meantime_starts_the_time_anew",
    ),
    "22 a title took a model's owner away": (
        (
            "unit/runtime/test_many_models.py::"
            "test_an_errand_leaves_a_model_to_its_owner_and_a_request_claims_it"
        ),
    ),
    "23 a cancelled waiter blocked the gate": (
        "unit/runtime/test_gate.py::test_a_task_that_is_cancelled_in_the_queue_blocks_nobody",
        (
            "unit/runtime/test_gate.py::"
            "test_a_task_that_is_cancelled_as_its_turn_comes_gives_the_device_back"
        ),
    ),
    "24 owners of the device overlapped": (
        "unit/runtime/test_gate.py::test_owners_pass_in_the_order_in_which_they_asked",
        "unit/runtime/test_gate.py::test_no_engine_starves_another",
    ),
    "25 a plugin's burst": ("there are no plugins",),
    "26 NaN in an argument": (
        "unit/runtime/test_mapper.py::test_arguments_without_a_json_form_become_an_error_object",
    ),
    "27 thousands of tokens a second": (
        "unit/engine/test_rate.py::test_a_burst_is_divided_by_the_time_that_it_took_to_come",
        "unit/engine/test_rate.py::test_it_says_nothing_before_there_is_something_to_say",
    ),
    "28 a tool turn went on to its limit": (
        "api/test_tool_calls.py::test_one_call_only_where_parallel_ones_are_not_wanted",
    ),
    "29 usage left the template and tools out": (
        (
            "api/test_default_model.py::"
            "test_streamed_and_plain_answers_agree_and_usage_is_the_tokenizers_count"
        ),
    ),
    "30 switching speculation on loaded nothing anew": ("no drafter runs yet",),
    "31 listed models that could not be shown": (
        "api/test_old_faults.py::test_every_model_that_is_listed_can_be_shown",
    ),
    "32 quotes in a message broke the body": (
        "unit/server/test_errors.py::test_any_message_makes_a_body_that_reads_back",
    ),
    "33 reordered keys lost the prefix": (
        "unit/runtime/test_canonical.py::test_the_order_of_keys_does_not_matter",
    ),
    "34 a proxy was trusted as this machine": (
        "api/test_keys.py::test_a_proxy_on_this_machine_speaks_for_strangers",
    ),
    "35 an errand overwrote the readout of settings": ("there is no such readout",),
    "36 a prompt without its picture": (
        (
            "unit/chat/test_prompt.py::"
            "test_a_picture_from_a_tool_becomes_a_note_and_one_from_a_user_is_refused"
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_test_keeps_it_away(fault: str) -> None:
    for proof in FAULTS[fault]:
        file, _, test = proof.partition("::")
        if test:
            assert f"def {test}(" in (TESTS / file).read_text(), f"{file} has no {test}"


def test_all_of_them_are_there() -> None:
    assert [int(fault.split()[0]) for fault in FAULTS] == list(range(1, 37))


def _model(folder: Path, **generation: Any) -> Path:
    backend = byte_level_tokenizer()
    save_tiny(folder, vocab_size=backend.get_vocab_size())
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSAURUS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OSAURUS_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


OPTIONS = LoadOptions(
    device="cpu", disk_cache=False, engine=EngineConfig(kv_budget_bytes=4_000_000)
)


def test_defaults_are_those_of_the_folder_that_was_opened(models: Path) -> None:
    _model(models / "one/twin", temperature=0.25)
    _model(models / "two/twin", temperature=0.75)
    source = BundleSource(OPTIONS)
    for name, temperature in (("one/twin", 0.25), ("two/twin", 0.75)):
        container = source.load(source.find(name))
        engine = container.make_engine(1)
        try:
            assert container.face(engine).sampling_defaults == {"temperature": temperature}
        finally:
            engine.shutdown()
            container.free()


def test_a_cut_answer_says_so_in_every_protocol(start: Start) -> None:
    running = start(lambda request, index: [Say("abcdefgh")])

    def post(path: str, **body: Any) -> Any:
        answer = httpx2.post(f"{running.url}{path}", json={"model": "m", **body}, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    chat = post("/v1/chat/completions", messages=HI, max_tokens=3)
    assert chat["choices"][0]["finish_reason"] == "length"
    assert post("/v1/messages", messages=HI, max_tokens=3)["stop_reason"] == "max_tokens"
    response = post("/v1/responses", input="hi", max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    ollama = post("/api/chat", messages=HI, stream=False, options={"num_predict": 3})
    assert ollama["done_reason"] == "length"
    whole = post("/v1/chat/completions", messages=HI, max_tokens=30)
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_strict_refuses_a_real_load_and_records_it(models: Path, tmp_path: Path) -> None:
    _model(models / "org/m")
    path = tmp_path / "s.json"
    safety = {"mode": "strict", "customPhysicalMemoryFraction": 0.000001}
    path.write_text(json.dumps({"memorySafety": safety}))
    source = BundleSource(OPTIONS)
    live = LiveSettings(SettingsStore(path, environment={}, legacy={}), source)
    with running_server(source, ServerConfig(port=0, drain_s=0.2, live=live)) as url:
        body = {"model": "org/m", "messages": HI, "max_tokens": 2}
        refused = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert error["code"] == "insufficient_resources"
        assert "memorySafety.customPhysicalMemoryFraction" in error["message"]
        stats = httpx2.get(f"{url}/admin/cache-stats").json()
        assert stats["models"] == []
        decision = stats["memory_safety"]["last_load_decision"]
        assert decision["allowed"] is False
        health = httpx2.get(f"{url}/health").json()
        assert (health["loaded"], health["inflight_load_bytes"]) == ([], 0)
        assert health["ram_feasibility"]["model"] == "org/m"


def test_every_model_that_is_listed_can_be_shown(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model(models / "org/one")
    hub = tmp_path / "hub/models--org--two"
    _model(hub / "snapshots/abc")
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with running_server(BundleSource(OPTIONS), ServerConfig(port=0, drain_s=0.2)) as url:
        names = [one["name"] for one in httpx2.get(f"{url}/api/tags").json()["models"]]
        assert any("two" in name for name in names)
        for name in names:
            shown = httpx2.post(f"{url}/api/show", json={"model": name}, timeout=30)
            assert shown.status_code == 200, name
        for one in httpx2.get(f"{url}/v1/models").json()["data"]:
            assert httpx2.get(f"{url}/v1/models/{one['id']}").status_code == 200
