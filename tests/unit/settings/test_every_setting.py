"""Claim: of every setting a test proves that it changes what runs, or the page says why it has no
effect here. The table names the tests; a new setting without a line in it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from osaurus.settings.schema import SETTINGS

TESTS = Path(__file__).resolve().parents[2]

_ENGINE = "unit/runtime/test_settings_run.py::test_the_engine_runs_as_the_setting_says"
_SAMPLING = "api/test_settings.py::test_sampling_is_the_requests_then_the_users_then_the_bundles"
_BATCH = "api/test_settings.py::test_the_batch_size_changes_with_the_next_request_and_no_load"
_STAYS = "api/test_request_settings.py::test_an_idle_model_stays_as_long_as_the_setting_says"
_ROOM = "api/test_request_settings.py::test_models_make_room_as_the_policy_and_its_threshold_say"
_SOCKET = "api/test_serve_settings.py::"
_KEY = "test_a_key_of_the_file_opens_the_server_and_this_machine_needs_none_if_trusted"
_REQUESTS = "api/test_request_settings.py::"
_LOADS = "unit/runtime/test_settings_run.py::"

#: Key to the test that shows its effect; keys that begin alike share a line.
PROOFS = {
    "network.host": _SOCKET + "test_serve_listens_where_the_file_says",
    "network.port": _SOCKET + "test_serve_listens_where_the_file_says",
    "network.expose": _SOCKET + "test_an_address_that_others_reach_must_be_meant",
    "network.allowedHosts": _SOCKET + "test_names_and_origins_are_those_of_the_file",
    "network.corsOrigins": _SOCKET + "test_names_and_origins_are_those_of_the_file",
    "network.servedModelName": (
        "api/test_settings.py::test_the_served_name_is_a_further_name_of_the_model_in_use"
    ),
    "network.logLevel": _SOCKET + "test_the_log_says_what_the_level_lets_through",
    "network.logFormat": _SOCKET + "test_the_log_is_written_as_the_file_says",
    "network.apiKey": _SOCKET + _KEY,
    "network.trustLoopback": _SOCKET + _KEY,
    "network.rateLimitRequestsPerMinute": (
        _REQUESTS + "test_more_requests_in_a_minute_than_allowed_are_told_when_to_come_again"
    ),
    "network.timeoutSeconds": (
        _REQUESTS + "test_an_answer_that_takes_too_long_ends_with_the_limit_in_words"
    ),
    "concurrency.maxConcurrentSequences": _BATCH,
    "concurrency.continuousBatching": _BATCH,
    "memorySafety.customMaxConcurrentSequences": _BATCH,
    "concurrency.prefillStepSize": _ENGINE,
    "concurrency.prefillBatchSize": (
        "unit/engine/test_idle.py::test_as_many_prompts_take_turns_as_the_setting_says"
    ),
    "concurrency.completionBatchSize": (
        "unit/engine/test_idle.py::test_as_many_requests_decode_in_one_forward_as_the_setting_says"
    ),
    "cache.prefix.enabled": _ENGINE,
    "cache.prefix.memoryLimitMB": _ENGINE,
    "cache.prefix.memoryPercent": _ENGINE,
    "cache.prefix.ttlMinutes": "unit/engine/test_idle.py::test_a_prefix_lasts_from_its_last_use",
    "cache.pagedKV.enabled": _ENGINE,
    "cache.pagedKV.blockSize": _ENGINE,
    "cache.pagedKV.maxBlocks": _ENGINE,
    "cache.liveKVCodec": _ENGINE,
    "cache.turboQuantKeyBits": _ENGINE,
    "cache.turboQuantValueBits": _ENGINE,
    "cache.storedKVCodec": _ENGINE,
    "cache.blockDisk.enabled": _ENGINE,
    "cache.blockDisk.maxSizePercent": _LOADS + "test_a_share_of_the_volume_is_taken_as_given",
    "cache.blockDisk.maxSizeGB": _ENGINE,
    "cache.blockDisk.directory": _LOADS + "test_prompts_lie_where_the_setting_says",
    "cache.enableSSMReDerive": _ENGINE,
    "power.autoSleepEnabled": (
        _REQUESTS + "test_deep_sleep_unloads_sooner_than_residency_and_never_later"
    ),
    "power.lightSleepAfterSeconds": (
        "unit/engine/test_idle.py::test_light_sleep_counts_from_the_last_work"
    ),
    "power.deepSleepAfterSeconds": (
        _REQUESTS + "test_deep_sleep_unloads_sooner_than_residency_and_never_later"
    ),
    "power.wakeOnRequest": (
        _REQUESTS + "test_an_idle_model_wakes_for_a_request_unless_the_settings_forbid_it"
    ),
    "power.jitLoad": _REQUESTS + "test_models_load_by_hand_only_where_the_settings_say_so",
    "generation.maxTokens": _SAMPLING,
    "generation.temperature": _SAMPLING,
    "generation.topP": _SAMPLING,
    "generation.topK": _SAMPLING,
    "generation.minP": _SAMPLING,
    "generation.repetitionPenalty": _SAMPLING,
    "generation.streamInterval": (
        _REQUESTS + "test_a_stream_sends_as_many_pieces_at_once_as_the_setting_says"
    ),
    "tools.toolParserOverride": _LOADS + "test_parsers_are_those_of_the_setting",
    "tools.reasoningParserOverride": _LOADS + "test_parsers_are_those_of_the_setting",
    "tools.customChatTemplate": (
        _LOADS + "test_a_template_of_the_users_own_is_rendered_and_read_for_its_formats"
    ),
    "performance.device": _LOADS + "test_the_device_is_the_one_that_was_named",
    "performance.threads": (_LOADS + "test_a_step_runs_on_as_many_threads_as_the_setting_says"),
    "performance.computeMode": _ENGINE,
    "performance.quantizeOnLoad": _LOADS + "test_weights_are_quantized_as_the_setting_says",
    "performance.maxContextTokens": _ENGINE,
    "performance.latencyBudgetMs": _ENGINE,
    "performance.kvBudgetMB": _ENGINE,
    "memorySafety.mode": _LOADS + "test_strict_refuses_and_the_others_only_warn",
    "memorySafety.slider": "unit/settings/test_load.py::test_the_slider_is_the_mode",
    "memorySafety.failClosedWhenEstimateUnknown": (
        _LOADS + "test_an_unknown_size_is_refused_where_the_setting_says_so"
    ),
    "memorySafety.customPhysicalMemoryFraction": (
        _LOADS + "test_the_users_fraction_counts_instead_of_the_modes"
    ),
    "memorySafety.customAllocatorCacheBytes": _LOADS + "test_an_allocator_keeps_what_it_may",
    "residency.evictionPolicy": _ROOM,
    "residency.mode": _STAYS,
    "residency.seconds": _STAYS,
    "residency.loadRAMSoftThreshold": _ROOM,
    "residency.loadRAMHardThreshold": (
        "api/test_health_details.py::test_the_thresholds_judge_the_load_that_was_tried_last"
    ),
    "guardrails.degenerationDetection": (
        _REQUESTS + "test_an_answer_that_repeats_itself_is_flagged_as_soon_as_the_setting_says_so"
    ),
    "models.directory": (
        "unit/settings/test_places.py::test_the_file_names_the_directory_and_the_environment_wins"
    ),
    "models.extraDirectories": (
        "unit/settings/test_places.py::test_further_folders_and_caches_are_searched_in_their_order"
    ),
    "models.hubCaches": (
        "unit/settings/test_places.py::test_further_folders_and_caches_are_searched_in_their_order"
    ),
    "models.aliases": (
        "api/test_settings.py::test_a_programs_own_model_names_are_those_that_the_setting_says"
    ),
    "prompt.keepAttributionLine": (
        "api/test_settings.py::test_a_billing_line_is_left_in_as_soon_as_the_setting_says_so"
    ),
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.key)
def test_it_changes_what_runs_or_the_page_says_why_not(setting: object) -> None:
    one = next(known for known in SETTINGS if known is setting)
    if not one.is_used:
        assert one.key not in PROOFS
        assert re.fullmatch(r"\S.{20,}\.", one.help), "say why it has no effect"
        return
    file, _, test = PROOFS[one.key].partition("::")
    text = (TESTS / file).read_text()
    assert f"def {test}(" in text, f"{file} has no {test}"


def test_the_table_names_settings_only() -> None:
    assert set(PROOFS) <= {one.key for one in SETTINGS}
