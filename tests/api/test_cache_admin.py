"""What the server tells of its prefix caches, to whom, and how they are emptied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from api.conftest import Running, Start
from api.scripted_engine import Emit, Hold, Say, ScriptedEngine, ScriptedSource, Step
from osaurus.server import auth
from osaurus.server.serve import ServerConfig
from osaurus.types.cache import CacheStats
from osaurus.types.engine import GenerationRequest
from osaurus.types.events import Info, PrefillProgress

HI = [{"role": "user", "content": "hi"}]

STATS = CacheStats(
    model_key="m@0|dtype=bf16",
    lookups=10,
    memory_hits=4,
    disk_hits=2,
    misses=5,
    hit_tokens=600,
    prompt_tokens=1000,
    evictions=3,
    kv_mode="affine(8,64)",
    topology={"full_attention": 6, "short_conv": 10, "sliding_window": 2},
    disk={"stores": 7, "corruptions": 1, "bytes": 900, "quota_bytes": 1000},
)


@contextmanager
def _two_models(start: Start) -> Iterator[tuple[Running, ScriptedSource]]:
    """Both loaded, `b` last."""
    source = ScriptedSource({"a": ScriptedEngine(), "b": ScriptedEngine()}, aliases={"B": "b"})
    running = start(source=source)
    for name in ("a", "b"):
        source.engines[name].stats = STATS
        running.client().chat.completions.create(model=name, messages=HI)
    yield running, source


def _stats(running: Running) -> dict[str, Any]:
    response = httpx2.get(f"{running.url}/admin/cache-stats")
    assert response.status_code == 200
    return response.json()


def test_nothing_is_loaded_to_tell_of_nothing(running: Running) -> None:
    body = _stats(running)
    assert body["models"] == []
    assert set(body["aggregate"].values()) == {0}
    assert running.source.loads == []


def test_every_resident_model_has_a_row_and_the_sums_are_theirs(start: Start) -> None:
    with _two_models(start) as (running, _):
        body = _stats(running)
    current, other = body["models"]
    assert (current["name"], current["is_current"]) == ("b", True)
    assert (other["name"], other["is_current"]) == ("a", False)
    assert current["effective_kv_mode"] == "affine(8,64)"
    assert current["cache_topology"] == {
        "layer_count": 18,
        "kv_layer_count": 6,
        "rotating_kv_layer_count": 2,
        "mamba_layer_count": 0,
        "hybrid_pool_layer_count": 0,
        "zaya_cca_layer_count": 0,
    }
    assert (current["paged_cache"]["hits"], current["paged_cache"]["misses"]) == (4, 6)
    assert current["block_disk_store"] == {
        "enabled": True,
        "hits": 2,
        "misses": 5,
        "stores": 7,
        "current_bytes": 900,
        "max_size_bytes": 1000,
    }
    assert current["stats"]["disk"]["corruptions"] == 1
    assert current["stats"]["model_key"] == STATS.model_key
    assert current["stats"]["hit_tokens"] == 600
    assert current["stats"]["topology"] == dict(STATS.topology)
    sums = body["aggregate"]
    assert (sums["lookups"], sums["prefix_hits"], sums["prefix_misses"]) == (20, 10, 10)
    assert (sums["paged_hits"], sums["disk_l2_hits"], sums["disk_l2_stores"]) == (8, 4, 14)
    assert (sums["hit_tokens"], sums["prompt_tokens"]) == (1200, 2000)


def test_a_disk_tier_that_is_off_says_why(start: Start) -> None:
    source = ScriptedSource({"m": ScriptedEngine()})
    source.engines["m"].stats = CacheStats(misses=3, disk_off="/x cannot be written")
    running = start(source=source)
    running.client().chat.completions.create(model="m", messages=HI)
    body = _stats(running)
    (row,) = body["models"]
    assert row["block_disk_store"]["enabled"] is False
    assert row["block_disk_store"]["misses"] == body["aggregate"]["disk_l2_misses"] == 0
    assert row["stats"]["disk_off"] == "/x cannot be written"


@pytest.mark.parametrize(
    ("body", "cleared"),
    [(None, ["a", "b"]), ({}, ["a", "b"]), ({"model": "a"}, ["a"]), ({"model": "B"}, ["b"])],
)
def test_a_cache_is_cleared_for_one_model_or_for_all(
    start: Start, body: dict[str, str] | None, cleared: list[str]
) -> None:
    with _two_models(start) as (running, source):
        response = httpx2.post(f"{running.url}/admin/cache/clear", json=body)
        assert (response.status_code, response.json()["cleared"]) == (200, cleared)
        counts = {name: engine.num_cleared for name, engine in source.engines.items()}
    assert counts == {name: int(name in cleared) for name in ("a", "b")}


def test_a_model_that_is_absent_or_not_loaded_is_told_apart(running: Running) -> None:
    def clear(body: Any) -> tuple[int, str]:
        response = httpx2.post(f"{running.url}/admin/cache/clear", json=body)
        return response.status_code, response.json()["error"]["code"]

    assert clear({"model": "absent"}) == (404, "model_not_found")
    assert clear({"model": "m"}) == (400, "invalid_request_error")
    assert clear({"model": 1}) == (400, "invalid_value")
    assert running.source.loads == []


PATHS = [("GET", "/admin/cache-stats"), ("POST", "/admin/cache/clear")]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("prefix", ["", "/v1", "/api", "/anthropic/v1"])
def test_no_page_of_another_origin_reaches_them_under_any_spelling(
    start: Start, method: str, path: str, prefix: str
) -> None:
    running = start(config=ServerConfig(port=0, cors_origins=("*",)))
    foreign = {"origin": "https://evil.example"}
    response = httpx2.request(method, running.url + prefix + path, headers=foreign)
    assert response.status_code == 403
    assert "https://evil.example" in response.json()["error"]["message"]
    assert httpx2.request(method, running.url + prefix + path).status_code == 200


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_what_a_proxy_forwards_is_not_of_this_machine(
    running: Running, method: str, path: str
) -> None:
    for header in ("X-Forwarded-For", "X-Forwarded-Anything", "Forwarded", "X-Real-IP"):
        response = httpx2.request(method, running.url + path, headers={header: "1.2.3.4"})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        health = httpx2.get(f"{running.url}/health", headers={header: "1.2.3.4"}).json()
        assert "loaded" not in health


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_another_machine_is_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    monkeypatch.setattr(auth, "is_loopback", lambda host: False)
    response = httpx2.request(method, running.url + path)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


# What a request says of the cache.


def _cached(request: GenerationRequest, index: int) -> Sequence[Step]:
    """The first choice read 40 tokens of its prompt from the cache, the others share its own."""
    cached = 40 if index == 0 else 60
    info = Info(prompt_tokens=60, cached_prompt_tokens=cached, cache_detail="paged")
    return [Say("x"), Emit(info)]


@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_what_came_from_the_cache_once_for_all_choices(start: Start, n: int) -> None:
    client = start(_cached).client().chat.completions
    plain = client.create(model="m", messages=HI, n=n).usage
    *_, last = client.create(
        model="m", messages=HI, n=n, stream=True, stream_options={"include_usage": True}
    )
    for usage in (plain, last.usage):
        assert usage is not None
        assert usage.prompt_tokens == 60
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 40


def test_the_stages_of_the_cache_reach_who_asks_for_progress(start: Start) -> None:
    reports = [
        PrefillProgress(stage="cache_lookup", completed=0, total=100, detail="checking"),
        PrefillProgress(stage="cache_lookup", completed=0, total=100, detail="disk"),
        # Less than a step and at once: still news.
        PrefillProgress(stage="cache_restore", completed=3, total=100, detail="disk"),
    ]
    end = PrefillProgress(stage="complete", completed=100, total=100, detail="decode_ready")
    # A report that waits in a mailbox is replaced by the next, so each is read before that.
    steps = [step for i, one in enumerate(reports) for step in (Hold(f"{i}"), Emit(one))]
    running = start(lambda request, index: [*steps, Hold("end"), Emit(end), Say("x")])
    chunks = running.client().chat.completions.create(
        model="m",
        messages=HI,
        stream=True,
        extra_body={"stream_options": {"include_progress": True}},
    )
    gates = iter(("0", "1", "2", "end"))
    shown = []
    for chunk in chunks:
        sent = {} if chunk.choices else chunk.model_extra["osaurus_prefill"]
        if sent and sent["stage"] != "queued":  # the made engine's own two come first
            shown.append((sent["stage"], sent["completed"], sent.get("detail")))
            if gate := next(gates, ""):
                running.engine.open_gate(gate)
    assert shown[1:] == [(one.stage, one.completed, one.detail) for one in (*reports, end)]
