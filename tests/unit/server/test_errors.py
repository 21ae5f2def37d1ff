"""Every error of the tree has a status, and its body reads back as it was."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from osaurus import errors
from osaurus.server.errors import RequestRefused, error_body, error_response, status_of
from osaurus.server.paths import Protocol


def _leaves(error: type[errors.OsaurusError]) -> set[type[errors.OsaurusError]]:
    return {error}.union(*(_leaves(child) for child in error.__subclasses__()))


def test_every_error_of_the_tree_but_a_bug_is_in_the_table() -> None:
    known = _leaves(errors.OsaurusError) - {errors.OsaurusError, RequestRefused}
    unknown = set()
    for kind in known:
        probe = errors.OsaurusError("x")
        probe.code = kind.code
        body = json.loads(error_body(probe, "openai"))["error"]
        if body["type"] == "internal_error" and not issubclass(kind, errors.EngineError):
            unknown.add(kind)
    assert unknown == set()


def test_a_users_mistake_is_never_a_server_error() -> None:
    for kind in _leaves(errors.UserError) - {RequestRefused}:
        probe = errors.OsaurusError("x")
        probe.code = kind.code
        assert 400 <= status_of(probe) < 500


_MESSAGES: dict[Protocol, Callable[[Any], str]] = {
    "openai": lambda body: body["error"]["message"],
    "responses": lambda body: body["error"]["message"],
    "anthropic": lambda body: body["error"]["message"],
    "ollama": lambda body: body["error"],
}


@pytest.mark.parametrize("protocol", _MESSAGES)
@pytest.mark.parametrize("message", ['quote " and \\', "line\nbreak", "émoji 🦖", "\u2028\x00"])
def test_any_message_makes_a_body_that_reads_back(message: str, protocol: Protocol) -> None:
    body = json.loads(error_body(errors.UserError(message), protocol))
    assert _MESSAGES[protocol](body) == message


def test_anthropic_has_words_of_its_own() -> None:
    body = json.loads(error_body(errors.ModelNotFound("m"), "anthropic"))
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


def test_advice_and_headers_of_an_error_are_sent() -> None:
    overloaded = error_response(errors.ServerOverloaded("full", retry_after_s=3), "openai")
    assert (overloaded.status_code, overloaded.headers["retry-after"]) == (503, "3")
    refused = error_response(RequestRefused("method_not_allowed", "no", {"allow": "GET"}), "ollama")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
