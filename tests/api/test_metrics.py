"""`/metrics` is what Prometheus reads, under the names that dashboards know."""

from __future__ import annotations

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.conftest import Running, Start
from api.scripted_engine import Fail, Hold, Say, Step
from osaurus.types.engine import GenerationRequest


def _samples(running: Running) -> dict[str, float]:
    """Value by name and labels, `name{a=b}` with the labels in order."""
    response = httpx2.get(f"{running.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        sample.name
        + "{"
        + ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        + "}": sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_answers_are_counted_by_why_they_ended(start: Start) -> None:
    running = start(lambda request, index: [Say("Hello")])
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for more in ({}, {"max_tokens": 2}):
        httpx2.post(f"{running.url}/v1/chat/completions", json=body | more)
    found = _samples(running)
    assert found["osaurus:request_success_total{finished_reason=stop,model_name=m}"] == 1
    assert found["osaurus:request_success_total{finished_reason=length,model_name=m}"] == 1
    assert found["osaurus:generation_tokens_total{model_name=m}"] == 7
    assert found["osaurus:prompt_tokens_total{model_name=m}"] > 0
    assert found["osaurus:time_to_first_token_seconds_count{model_name=m}"] == 2
    assert found["osaurus:e2e_request_latency_seconds_count{model_name=m}"] == 2
    assert found["osaurus:inter_token_latency_seconds_count{model_name=m}"] <= 5
    assert found["http_requests_total{handler=/chat/completions,method=POST,status=200}"] == 2


def test_failures_and_hang_ups_are_told_apart(start: Start) -> None:
    def script(request: GenerationRequest, index: int) -> list[Step]:
        if request.params.max_tokens == 7:
            return [Say("a"), Hold("gate")]
        return [Say("a"), Fail("broken")]

    running = start(script)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    url = f"{running.url}/v1/chat/completions"
    assert httpx2.post(url, json=body).status_code == 500
    with httpx2.stream("POST", url, json={**body, "stream": True, "max_tokens": 7}) as response:
        running.engine.wait_until_held("gate")
        assert response.status_code == 200
        during = _samples(running)
    running.engine.wait_until_idle()
    found = _samples(running)
    assert during["osaurus:num_requests_running{model_name=m}"] == 1
    assert during["osaurus:http_inference_inflight{}"] == 1
    assert found["osaurus:num_requests_running{model_name=m}"] == 0
    assert found["osaurus:request_success_total{finished_reason=error,model_name=m}"] == 1


@pytest.mark.parametrize("path", ["/metrics", "/v1/metrics"])
def test_nothing_is_loaded_by_looking(running: Running, path: str) -> None:
    text = httpx2.get(running.url + path).text
    assert "osaurus:build_info" in text
    assert running.source.loads == []
