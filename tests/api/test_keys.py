"""A key guards every route, whichever protocol it belongs to (field case F47)."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from api.conftest import SEVERAL, Running, Start
from api.scripted_engine import ScriptedEngine, ScriptedSource, say_hello
from osaurus.chat.service import ChatEngine
from osaurus.errors import InvalidField
from osaurus.runtime.pool import ModelRuntime
from osaurus.server.app import AppConfig, build_app
from osaurus.server.logs import TextLines
from osaurus.server.serve import HttpServer, ServerConfig
from osaurus.settings.keys import KeyRing

_OPEN = {"/", "/health", "/health/ready"}
_PROXIED = {"x-forwarded-for": "203.0.113.9"}


def _routes() -> list[Route]:
    source = ScriptedSource({"m": ScriptedEngine(say_hello)})
    return build_app(ChatEngine(ModelRuntime(source)), AppConfig()).routes


def _cases(*prefixes: str) -> list[tuple[str, str]]:
    """Every method and path that the running app knows, plain and with each prefix."""
    found = [
        (method, prefix + re.sub(r"\{[^}]*\}", "x", route.path))
        for route in _routes()
        for method in sorted(route.methods or ())
        for prefix in ("", *prefixes)
        if route.path not in _OPEN
    ]
    return [*found, ("GET", "/no/such/path"), ("POST", "/v1/messages/none"), ("HEAD", "/models")]


@pytest.fixture
def keyed(start: Start, tmp_path: Path) -> tuple[Running, str, KeyRing]:
    ring = KeyRing(tmp_path / "api-keys.json")
    _, text = ring.create("test")
    config = ServerConfig(
        port=0, drain_s=0.2, runtime=SEVERAL, keys_file=ring.path, trusts_loopback=False
    )
    return start(config=config), text, ring


def test_no_route_answers_without_a_key_and_every_one_does_with_it(
    keyed: tuple[Running, str, KeyRing],
) -> None:
    running, text, _ = keyed
    with httpx2.Client(base_url=running.url) as client:
        for method, path in _cases("/v1", "/api", "/v1/api", "/anthropic"):
            assert client.request(method, path).status_code == 401, (method, path)
        for method, path in _cases():
            # A body that would be a 400 shows that it was not looked at.
            body = None if method in ("GET", "HEAD") else b"{"
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                response = client.request(method, path, headers=headers, content=body)
                assert response.status_code == 401, (method, path)
                assert "bearer" in response.headers["www-authenticate"].lower()
                if method != "HEAD":
                    _check_envelope(path, response.json())
            if "shutdown" in path:
                continue
            for headers in ({"authorization": f"Bearer {text}"}, {"x-api-key": text}):
                response = client.request(method, path, headers=headers, content=body)
                assert response.status_code != 401, (method, path)


def _check_envelope(path: str, body: Any) -> None:
    if "/messages" in path or path.startswith("/anthropic"):
        assert body["type"] == "error"
        assert body["error"]["type"] == "authentication_error"
    elif isinstance(body["error"], str):
        assert path.startswith(("/api/", "/v1/", "/")), path
    else:
        assert body["error"]["type"] == "authentication_error"


def test_what_is_open_tells_no_names(keyed: tuple[Running, str, KeyRing]) -> None:
    running, text, _ = keyed
    body = httpx2.get(f"{running.url}/health").json()
    assert set(body) == {"status", "timestamp"}
    body = httpx2.get(f"{running.url}/health", headers={"x-api-key": text}).json()
    assert "loaded" in body


def test_an_ollama_client_is_refused_in_its_own_form(
    keyed: tuple[Running, str, KeyRing],
) -> None:
    running, _, _ = keyed
    body = httpx2.get(f"{running.url}/api/tags").json()
    assert isinstance(body["error"], str)


def test_a_proxy_on_this_machine_speaks_for_strangers(start: Start) -> None:
    running = start()
    assert httpx2.get(f"{running.url}/v1/models").status_code == 200
    refused = httpx2.get(f"{running.url}/v1/models", headers=_PROXIED)
    assert refused.status_code == 401
    assert "osaurus keys create" in refused.json()["error"]["message"]


def test_a_key_that_is_revoked_opens_nothing_from_then_on(
    keyed: tuple[Running, str, KeyRing],
) -> None:
    running, text, ring = keyed
    headers = {"authorization": f"Bearer {text}"}
    assert httpx2.get(f"{running.url}/v1/models", headers=headers).status_code == 200
    ring.revoke(ring.keys[0].id)
    refused = httpx2.get(f"{running.url}/v1/models", headers=headers)
    assert refused.status_code == 401
    assert "revoked" in refused.json()["error"]["message"]


def test_a_key_is_never_logged(
    keyed: tuple[Running, str, KeyRing], caplog: pytest.LogCaptureFixture
) -> None:
    running, text, _ = keyed
    with caplog.at_level(logging.DEBUG):
        for key in (text, "wrong-key-7777"):
            httpx2.get(f"{running.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    lines = "\n".join(TextLines().format(record) for record in caplog.records)
    assert text not in lines
    assert "wrong-key-7777" not in lines


def test_a_server_for_others_does_not_start_without_a_key(tmp_path: Path) -> None:
    source = ScriptedSource({"m": ScriptedEngine(say_hello)})

    def config(**more: Any) -> ServerConfig:
        return ServerConfig(host="0.0.0.0", port=0, keys_file=tmp_path / "keys.json", **more)

    with pytest.raises(InvalidField, match="osaurus keys create"):
        HttpServer(source, config())
    HttpServer(source, config(expose=True)).close()
    KeyRing(tmp_path / "keys.json").create("one")
    HttpServer(source, config()).close()


def test_guests_of_an_open_server_may_chat_but_not_change_it(start: Start) -> None:
    running = start(config=ServerConfig(port=0, drain_s=0.2, runtime=SEVERAL, expose=True))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    url = f"{running.url}/v1/chat/completions"
    assert httpx2.post(url, json=body, headers=_PROXIED).status_code == 200
    for method, path in (("POST", "/admin/unload"), ("GET", "/admin/runtime-settings")):
        answer = httpx2.request(method, f"{running.url}{path}", headers=_PROXIED)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "local_only"


def test_a_control_character_in_a_path_makes_no_second_log_line(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        httpx2.get(f"{running.url}/v1/models/a%0aINFO%20forged%1b[2J")
        httpx2.get(f"{running.url}/v1/models")
    lines = [TextLines().format(record) for record in caplog.records]
    assert not any("\n" in line or "\x1b" in line for line in lines)
    assert any("forged" in line for line in lines)
