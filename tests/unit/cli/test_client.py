"""Proves what the terminal's client makes of a server: pieces, endings, refusals, absence."""

from __future__ import annotations

import socket

import pytest

from osaurus.cli.client import Delta, ServerClient, configured_address
from osaurus.errors import EngineError, InvalidField, UserError
from unit.cli.scripted_server import end_frames, scripted_server, text_frame


def _ask(address: str) -> list[Delta]:
    with ServerClient(address) as client:
        return list(client.stream_chat(model="m", messages=[], options={"seed": 3}))


def test_an_answer_arrives_in_pieces_with_usage_last() -> None:
    frames = [text_frame("", reasoning_content="hm"), text_frame("Pa"), text_frame("ris")]
    with scripted_server(lambda _: [*frames, *end_frames()]) as server:
        deltas = _ask(server.address + "/v1/")
        assert server.requests[0]["seed"] == 3
        assert server.requests[0]["stream_options"] == {
            "include_usage": True,
            "include_progress": True,
        }
    assert "".join(delta.text for delta in deltas) == "Paris"
    assert deltas[0].reasoning == "hm"
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert deltas[-1].usage["completion_tokens"] == 3


def test_a_refusal_keeps_the_servers_words_and_code() -> None:
    with scripted_server(lambda _: []) as server:
        server.refuse_with = (404, {"error": {"message": "no x", "code": "model_not_found"}})
        with pytest.raises(UserError) as caught:
            _ask(server.address)
    assert (caught.value.message, caught.value.code) == ("no x", "model_not_found")


def test_a_body_that_is_no_error_object_is_still_reported() -> None:
    with scripted_server(lambda _: []) as server:
        server.refuse_with = (502, {"detail": "gateway"})
        with pytest.raises(EngineError, match=r"502.*gateway"):
            _ask(server.address)


def test_an_error_inside_the_stream_is_raised_after_the_text() -> None:
    frames = [text_frame("Pa"), {"error": {"message": "it broke"}}, "[DONE]"]
    with scripted_server(lambda _: frames) as server, ServerClient(server.address) as client:
        stream = client.stream_chat(model="m", messages=[], options={})
        assert next(stream).text == "Pa"
        with pytest.raises(EngineError, match="it broke"):
            next(stream)


def test_a_stream_without_its_end_is_an_error_not_an_answer() -> None:
    with (
        scripted_server(lambda _: [text_frame("Pa")]) as server,
        pytest.raises(EngineError, match="before its end"),
    ):
        _ask(server.address)


def test_closing_the_stream_disconnects() -> None:
    def endless(_):
        while True:
            yield text_frame("more ")

    with scripted_server(endless) as server, ServerClient(server.address) as client:
        stream = client.stream_chat(model="m", messages=[], options={})
        next(stream)
        stream.close()
        assert server.disconnects.acquire(timeout=20)


def test_nothing_listening_is_said_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with ServerClient(address) as client:
        assert client.health() is None
    with pytest.raises(EngineError, match="osaurus serve"):
        _ask(address)


def test_only_a_named_model_not_found_means_that_the_model_is_missing() -> None:
    with scripted_server(lambda _: []) as server, ServerClient(server.address) as client:
        assert client.health() == {"status": "healthy"}
        assert client.has_model("org/any")
        server.models = {"org/known"}
        assert client.has_model("org/known")
        assert not client.has_model("other")


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("", "", "http://127.0.0.1:1337"),
        ("0.0.0.0", "80", "http://127.0.0.1:80"),
        ("::1", "", "http://[::1]:1337"),
    ],
)
def test_the_address_comes_from_the_environment(
    host: str, port: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSAURUS_SERVER__HOST", host)
    monkeypatch.setenv("OSAURUS_SERVER__PORT", port)
    assert configured_address() == address


@pytest.mark.parametrize("port", ["0", "65536", "http", "²"])
def test_a_port_that_is_none_is_refused_by_name(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSAURUS_SERVER__PORT", port)
    with pytest.raises(InvalidField, match="OSAURUS_SERVER__PORT"):
        configured_address()
