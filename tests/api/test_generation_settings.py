"""`GET /admin/generation-settings`: what each model was asked with last, and how that went."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import httpx2

from api.conftest import Running, Start
from api.scripted_engine import (
    Emit,
    Fail,
    Hold,
    Say,
    ScriptedEngine,
    ScriptedSource,
    Step,
    say_hello,
)
from osaurus.chat.records import MAX_MODELS, GenerationRecords
from osaurus.server.serve import ServerConfig
from osaurus.types.engine import GenerationRequest
from osaurus.types.events import Info
from osaurus.types.sampling import SamplingParams

PATH = "/admin/generation-settings"
HI = [{"role": "user", "content": "hi"}]


def told(running: Running) -> list[dict[str, Any]]:
    answer = httpx2.get(running.url + PATH, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["models"]


def ask(running: Running, **fields: Any) -> httpx2.Response:
    body = {"model": "m", "messages": HI, **fields}
    return httpx2.post(f"{running.url}/v1/chat/completions", json=body, timeout=30)


def test_nothing_is_loaded_to_tell_of_nothing(running: Running) -> None:
    assert told(running) == []
    assert running.source.loads == []


def test_effective_settings_are_the_requests_over_the_bundles_over_the_engines(
    start: Start,
) -> None:
    source = ScriptedSource(
        {"m": ScriptedEngine(say_hello)}, sampling_defaults={"temperature": 0.3, "top_p": 0.8}
    )
    running = start(source=source)
    ask(running, top_p=0.5, max_tokens=7, seed=11)
    (row,) = told(running)
    assert (row["name"], row["is_loaded"], row["stage"]) == ("m", True, "submitted")
    assert row["bundle_defaults"] == {"temperature": 0.3, "top_p": 0.8}
    wanted = {"temperature": 0.3, "top_p": 0.5, "max_tokens": 7, "seed": 11, "top_k": 0}
    assert {name: row["effective"][name] for name in wanted} == wanted
    ask(running)
    (row,) = told(running)
    assert row["effective"]["top_p"] == 0.8
    assert row["effective"]["max_tokens"] == 4096 - row["last_request"]["prompt_tokens"]


def test_a_model_that_was_only_loaded_has_its_bundles_values_and_no_request(
    start: Start,
) -> None:
    source = ScriptedSource({"m": ScriptedEngine(say_hello)}, sampling_defaults={"top_k": 20})
    running = start(source=source)
    httpx2.post(f"{running.url}/admin/preload", json={"model": "m"}, timeout=30)
    assert told(running) == [
        {
            "name": "m",
            "is_loaded": True,
            "bundle_defaults": {"top_k": 20},
            "stage": None,
            "effective": None,
            "last_request": None,
        }
    ]


def test_a_request_that_waits_for_its_model_is_pending_until_it_is_submitted(
    start: Start,
) -> None:
    source = ScriptedSource(
        {"m": ScriptedEngine(say_hello)}, sampling_defaults={"temperature": 0.3}
    )
    source.gates["m"] = threading.Event()
    running = start(source=source)
    asking = threading.Thread(target=ask, args=(running,), kwargs={"top_p": 0.5})
    asking.start()
    try:
        while not (rows := told(running)) or not source.loads:
            pass
        (row,) = rows
        assert (row["stage"], row["is_loaded"]) == ("pending_preload", False)
        assert row["effective"]["top_p"] == 0.5
        assert row["bundle_defaults"] is None
        assert row["last_request"] is None
    finally:
        source.gates["m"].set()
        asking.join(30)
    (row,) = told(running)
    assert (row["stage"], row["bundle_defaults"]) == ("submitted", {"temperature": 0.3})
    assert row["effective"]["temperature"] == 0.3


def test_a_model_that_does_not_load_stays_pending(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine(say_hello)})
    source.failures["m"] = ValueError("broken")
    running = start(source=source)
    assert ask(running, seed=5).status_code >= 400
    (row,) = told(running)
    assert (row["stage"], row["effective"]["seed"]) == ("pending_preload", 5)


def test_a_model_that_went_keeps_what_it_was_asked(running: Running) -> None:
    ask(running)
    httpx2.post(f"{running.url}/admin/unload", json={"model": "m"}, timeout=30)
    (row,) = told(running)
    assert (row["is_loaded"], row["stage"]) == (False, "submitted")
    assert row["last_request"]["stop_reason"] == "stop"


def _timed(request: GenerationRequest, index: int) -> Sequence[Step]:
    info = Info(
        prompt_tokens=len(request.token_ids),
        cached_prompt_tokens=20 - index,
        generated_tokens=1,
        queue_time_s=0.25,
        prompt_time_s=1.5,
        restore_time_s=0.5,
        generate_time_s=2.0 + index,
        stop_reason="length",
    )
    return [Say("x"), Emit(info)]


def test_the_last_request_has_its_counts_and_times(start: Start) -> None:
    running = start(_timed)
    answer = ask(running)
    (row,) = told(running)
    last, timing = row["last_request"], row["last_request"].pop("timing")
    assert last == {
        "activity_id": answer.headers["x-request-id"],
        "prompt_tokens": len(running.engine.requests[-1].token_ids),
        "cached_prompt_tokens": 20,
        "media": {"images": 0, "audio": 0, "video": 0, "salt": None},
        "decode_path": "plain",
        "stop_reason": "length",
    }
    assert (timing["queue_s"], timing["restore_s"]) == (0.25, 0.5)
    assert (timing["prefill_s"], timing["decode_s"]) == (1.0, 2.0)
    assert 0 < timing["template_s"] <= timing["prepare_s"]
    assert timing["prepare_s"] < timing["first_token_s"] < 30


def test_choices_are_one_request(start: Start) -> None:
    running = start(_timed)
    ask(running, n=3)
    (row,) = told(running)
    last = row["last_request"]
    assert (last["cached_prompt_tokens"], last["stop_reason"]) == (18, "length")
    assert last["timing"]["decode_s"] == 4.0


def test_a_grammar_is_another_path_of_decoding(start: Start) -> None:
    running = start(lambda request, index: [Say("{}")])
    answer = ask(running, response_format={"type": "json_object"})
    assert answer.status_code == 200, answer.text
    (row,) = told(running)
    assert row["last_request"]["decode_path"] == "constrained"


def test_a_failure_is_an_error_and_a_client_that_left_a_cancellation(start: Start) -> None:
    failing = start(lambda request, index: [Fail("out of luck")])
    assert ask(failing).status_code == 500
    (row,) = told(failing)
    assert row["last_request"]["stop_reason"] == "error"
    assert row["last_request"]["timing"]["first_token_s"] is None

    leaving = start(lambda request, index: [Say("x"), Hold("never")])
    body = {"model": "m", "messages": HI, "stream": True}
    with httpx2.stream("POST", f"{leaving.url}/v1/chat/completions", json=body) as stream:
        next(stream.iter_lines())
    leaving.engine.wait_until_idle()
    while (last := told(leaving)[0]["last_request"]) is None:
        pass
    assert last["stop_reason"] == "cancelled"
    assert last["prompt_tokens"] == len(leaving.engine.requests[-1].token_ids)
    assert last["timing"]["first_token_s"] > 0
    assert last["timing"]["decode_s"] is None


def test_raw_prompts_and_other_protocols_count_too(running: Running) -> None:
    running.client().completions.create(model="m", prompt="abc")
    (row,) = told(running)
    assert row["last_request"]["prompt_tokens"] == 3
    assert row["last_request"]["timing"]["template_s"] == 0
    body = {"model": "m", "messages": HI, "max_tokens": 9}
    httpx2.post(f"{running.url}/v1/messages", json=body, timeout=30)
    (row,) = told(running)
    assert row["effective"]["max_tokens"] == 9


def test_no_text_of_a_client_is_kept(running: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "a secret"}],
        "stop": ["secret stop", "b"],
        "logit_bias": {"5": 1, "6": 1, "7": -1},
        "user": "secret user",
    }
    assert ask(running, **body).status_code == 200
    text = httpx2.get(running.url + PATH, timeout=30).text
    assert "secret" not in text
    (row,) = told(running)
    assert (row["effective"]["stop"], row["effective"]["logit_bias"]) == (2, 3)


def test_a_prompt_that_is_only_shown_counts_for_nothing(running: Running) -> None:
    body = {"model": "m", "messages": HI}
    for path in ("/admin/render-prompt", "/v1/messages/count_tokens", "/tokenize"):
        answer = httpx2.post(running.url + path, json={**body, "max_tokens": 1}, timeout=30)
        assert answer.status_code == 200
    assert told(running) == []


def test_the_models_that_were_asked_least_recently_are_forgotten() -> None:
    records = GenerationRecords()
    for i in range(MAX_MODELS + 3):
        records.wait(f"m{i}", SamplingParams())
        records.wait("m0", SamplingParams(seed=i))
    names = list(records)
    assert len(names) == MAX_MODELS
    assert names[-1] == "m0"
    assert {"m1", "m2", "m3"}.isdisjoint(names)


def test_a_guest_of_an_open_server_is_refused(start: Start) -> None:
    running = start(config=ServerConfig(port=0, expose=True))
    answer = httpx2.get(running.url + PATH, headers={"X-Forwarded-For": "1.2.3.4"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "local_only")
    assert told(running) == []
