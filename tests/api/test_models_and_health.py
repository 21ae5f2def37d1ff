"""`/models`, `/health`, the spellings of a path, and what every response carries."""

from __future__ import annotations

import logging
import threading

import httpx2
import openai
import pytest

from api.conftest import Running, Start
from api.scripted_engine import ScriptedEngine, ScriptedSource
from osaurus.server.logs import JsonLines, TextLines
from osaurus.server.serve import ServerConfig

HI = [{"role": "user", "content": "hi"}]


def test_models_are_listed_and_found_by_id(start: Start) -> None:
    source = ScriptedSource({"org/m:Q4": ScriptedEngine(), "b": ScriptedEngine()})
    client = start(source=source).client()
    listed = client.models.list().data
    assert [model.id for model in listed] == ["b", "org/m:Q4"]
    assert all((model.object, model.owned_by) == ("model", "osaurus") for model in listed)
    assert client.models.retrieve("org/m:Q4").id == "org/m:Q4"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/absent")
    assert caught.value.code == "model_not_found"
    assert source.loads == []


def test_health_tells_what_is_loaded_without_loading(running: Running) -> None:
    before = httpx2.get(f"{running.url}/health").json()
    assert (before["status"], before["loaded"], before["current_model"]) == ("healthy", [], None)
    running.client().chat.completions.create(model="m", messages=HI)
    after = httpx2.get(f"{running.url}/health").json()
    assert after["instance_id"] == before["instance_id"]
    assert (after["loaded"], after["current_model"], after["inflight"]) == (["m"], "m", {})
    (row,) = after["resident_models"]
    assert (row["name"], row["is_current"], row["num_requests_running"]) == ("m", True, 0)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/chat/completions",
        "/api/chat/completions",
        "/v1/api/chat/completions",
        "/v1/chat/completions/",
    ],
)
def test_a_route_answers_under_all_its_prefixes(running: Running, path: str) -> None:
    response = httpx2.post(running.url + path, json={"model": "m", "messages": HI})
    assert response.status_code == 200


def test_unknown_paths_and_methods_have_an_error_body(running: Running) -> None:
    response = httpx2.post(f"{running.url}/v1/messages/no_such_thing", json={})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    response = httpx2.post(f"{running.url}/v1/no_such_thing", json={})
    assert response.json()["error"]["code"] == "unknown_path"
    response = httpx2.get(f"{running.url}/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_a_head_request_on_a_known_path_is_empty(running: Running) -> None:
    for path in ("/health", "/v1/models", "/v1/chat/completions"):
        response = httpx2.head(running.url + path)
        assert (response.status_code, response.content) == (204, b"")
    assert httpx2.head(f"{running.url}/nothing").status_code == 404


def test_every_response_has_its_own_request_id(running: Running) -> None:
    responses = [
        httpx2.get(f"{running.url}/health"),
        httpx2.get(f"{running.url}/nothing"),
        httpx2.post(f"{running.url}/v1/chat/completions", content=b"{"),
        httpx2.post(
            f"{running.url}/v1/chat/completions",
            json={"model": "m", "messages": HI, "stream": True},
        ),
    ]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == len(ids)


def test_each_request_is_one_log_line_without_its_text(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "a very private sentence"
    with caplog.at_level(logging.DEBUG):
        for stream in (False, True):
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": secret}],
                "stream": stream,
            }
            httpx2.post(f"{running.url}/v1/chat/completions", json=body)
        httpx2.post(f"{running.url}/v1/chat/completions", json={**body, "temperature": secret})
        lines = _request_lines(caplog, 3)
    assert "POST /v1/chat/completions 200 in" in lines[0]
    for fact in ("model=m", "prompt=", "cached=0", "completion=6", "finish=stop"):
        assert fact in lines[0]
        assert fact in lines[1]
    assert " 400 in" in lines[2]
    records = [r for r in caplog.records if r.name.startswith("osaurus")]
    ours = [form.format(record) for record in records for form in (TextLines(), JsonLines())]
    assert not any("private" in message or "Hello" in message for message in ours)


def _request_lines(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """A request's line is written when its last byte is out, so the client may be first."""
    pause = threading.Event()
    for _ in range(400):
        records = [r for r in caplog.records if r.name == "osaurus.server.requests"]
        lines = [TextLines().format(record) for record in records]
        if len(lines) >= count:
            break
        pause.wait(0.005)
    assert len(lines) == count
    return lines


def test_a_fault_of_ours_is_a_500_without_its_words(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.client().chat.completions.create(model="m", messages=HI)

    def break_down(request: object) -> object:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(running.engine, "generate", break_down)
    response = httpx2.post(
        f"{running.url}/v1/chat/completions", json={"model": "m", "messages": HI}
    )
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert httpx2.get(f"{running.url}/health").json()["inflight"] == {}


def test_a_foreign_host_or_origin_is_refused(running: Running) -> None:
    url = f"{running.url}/v1/models"
    assert httpx2.get(url, headers={"host": "evil.example"}).status_code == 403
    assert httpx2.post(url, headers={"origin": "https://evil.example"}).status_code == 403
    read = httpx2.get(url, headers={"origin": "https://evil.example"})
    assert read.status_code == 200
    assert "access-control-allow-origin" not in read.headers


def test_pages_of_this_machine_and_allowed_ones_may_call(start: Start) -> None:
    running = start(config=ServerConfig(port=0, cors_origins=("https://app.example",)))
    for origin in ("http://localhost:3000", "https://app.example"):
        response = httpx2.post(
            f"{running.url}/v1/chat/completions",
            json={"model": "absent", "messages": HI},
            headers={"origin": origin},
        )
        assert response.status_code == 404
        assert response.headers["access-control-allow-origin"] == origin
        preflight = httpx2.options(
            f"{running.url}/v1/chat/completions",
            headers={
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization, content-type",
            },
        )
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-methods"] == "POST"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
