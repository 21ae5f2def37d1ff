"""Every error of the tree has a status, and its body reads back as it was."""

import json

import pytest

from osaurus import errors
from osaurus.server.errors import RequestRefused, error_response, openai_body, status_of


def _leaves(error: type[errors.OsaurusError]) -> set[type[errors.OsaurusError]]:
    return {error}.union(*(_leaves(child) for child in error.__subclasses__()))


def test_every_error_of_the_tree_but_a_bug_is_in_the_table() -> None:
    known = _leaves(errors.OsaurusError) - {errors.OsaurusError, RequestRefused}
    unknown = set()
    for kind in known:
        probe = errors.OsaurusError("x")
        probe.code = kind.code
        body = json.loads(openai_body(probe))["error"]
        if body["type"] == "internal_error" and not issubclass(kind, errors.EngineError):
            unknown.add(kind)
    assert unknown == set()


def test_a_users_mistake_is_never_a_server_error() -> None:
    for kind in _leaves(errors.UserError) - {RequestRefused}:
        probe = errors.OsaurusError("x")
        probe.code = kind.code
        assert 400 <= status_of(probe) < 500


@pytest.mark.parametrize("message", ['quote " and \\', "line\nbreak", "émoji 🦖", "\u2028\x00"])
def test_any_message_makes_a_body_that_reads_back(message: str) -> None:
    body = json.loads(openai_body(errors.UserError(message)))
    assert body["error"]["message"] == message


def test_advice_and_headers_of_an_error_are_sent() -> None:
    overloaded = error_response(errors.ServerOverloaded("full", retry_after_s=3))
    assert (overloaded.status_code, overloaded.headers["retry-after"]) == (503, "3")
    refused = error_response(RequestRefused("method_not_allowed", "no", {"allow": "GET"}))
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
