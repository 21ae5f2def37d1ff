"""Requests made from the OpenAPI document: no 5xx, no hang, answers as the document says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS

from api.conftest import SEVERAL
from api.scripted_engine import Say, ScriptedEngine, ScriptedSource
from osaurus.server.openapi import document
from osaurus.server.serve import ServerConfig, running_server

_SCHEMA = schemathesis.openapi.from_dict(document())

#: What says of itself that it is not served, or not now.
_HONEST_FAILURES = (501, 503)

#: Slow clients and the network do not belong here: downloads have tests of their own.
_LEFT_OUT = ("/api/pull",)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    source = ScriptedSource({"m": ScriptedEngine(lambda request, index: [Say("Hello!")])})
    with running_server(source, ServerConfig(port=0, drain_s=0.2, runtime=SEVERAL)) as url:
        yield url


@pytest.mark.slow
@pytest.mark.timeout(300)
@_SCHEMA.exclude(path=list(_LEFT_OUT)).parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_of_the_document_breaks_the_server(case: schemathesis.Case, url: str) -> None:
    if isinstance(case.body, dict) and case.body.get("model", "") != "":
        case.body["model"] = "m"  # what is not there says little
    response = case.call(base_url=url, timeout=30)
    if response.status_code >= 500:
        assert response.status_code in _HONEST_FAILURES, response.text
        return
    assert response.headers["x-request-id"]
    case.validate_response(
        response,
        checks=CHECKS.get_by_names(["response_schema_conformance", "content_type_conformance"]),
    )
