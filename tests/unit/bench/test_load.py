"""Proves the HTTP load: usage counts, not frames; refusal where a server gives no usage."""

from __future__ import annotations

from random import Random

import pytest

from osaurus.bench.load import HttpLoad, Reply, _worst_gap, measure_http
from osaurus.bench.workloads import DidNotRun, Measurement, NotRun
from unit.cli.scripted_server import end_frames, scripted_server, text_frame


def test_tokens_are_the_servers_count_not_the_number_of_frames() -> None:
    frames = [text_frame("one two"), text_frame(" three")]
    with scripted_server(lambda _: [*frames, *end_frames(7, 40)]) as server:
        load = HttpLoad(server.address, "m")
        reply = load.ask("hi", 40)
        load.close()
    assert (reply.prompt_tokens, reply.completion_tokens, len(reply.times)) == (7, 40, 2)
    assert reply.tokens_per_s == pytest.approx(39 / (reply.times[1] - reply.times[0]))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([text_frame("hi"), "[DONE]"], "no usage"),
        (end_frames(), "no text"),
    ],
)
def test_a_stream_that_cannot_be_counted_has_no_speed(frames: list, reason: str) -> None:
    with scripted_server(lambda _: frames) as server:
        load = HttpLoad(server.address, "m")
        with pytest.raises(DidNotRun, match=reason):
            load.ask("hi", 4)
        load.close()


def test_a_refusal_is_quoted() -> None:
    with scripted_server(lambda _: []) as server:
        server.refuse_with = (404, {"error": {"message": "no such model"}})
        load = HttpLoad(server.address, "m")
        with pytest.raises(DidNotRun, match=r"404.*no such model"):
            load.ask("hi", 4)
        load.close()


def test_a_model_without_a_template_goes_on_with_the_text_itself() -> None:
    frames = [{"choices": [{"index": 0, "text": "and on"}]}, *end_frames(2, 3)]
    with scripted_server(lambda _: frames) as server:
        load = HttpLoad(server.address, "m", is_chat=False, extra={"ignore_eos": True})
        reply = load.ask("on", 3)
        load.close()
    assert len(reply.times) == 1
    body = server.requests[0]
    assert (body["prompt"], body["ignore_eos"]) == ("on", True)
    assert "messages" not in body


def test_every_figure_of_a_users_view_is_taken() -> None:
    frames = [text_frame("Once "), text_frame("more"), *end_frames(50, 6)]
    with scripted_server(lambda _: frames) as server:
        load = HttpLoad(server.address, "m")
        found = measure_http(load, rounds=1, new_tokens=6, streams=[1, 2], prefix_words=50, seed=1)
        load.close()
    assert [outcome.workload for outcome in found] == [
        "first token, short prompt",
        "decode 1 stream",
        "decode 2 streams",
        "first token, 50 token prompt, cold",
        "first token, 50 token prompt, same prefix again",
        "longest gap while a long prompt arrives",
    ]
    measured = [outcome for outcome in found[:-1] if isinstance(outcome, Measurement)]
    assert len(measured) == 5
    assert all(outcome.median > 0 for outcome in measured)


def test_no_prompt_begins_as_one_of_an_earlier_run_did() -> None:
    frames = [text_frame("Once "), text_frame("more"), *end_frames(50, 6)]
    beginnings: list[str] = []
    for _ in range(2):
        with scripted_server(lambda _: frames) as server:
            load = HttpLoad(server.address, "m")
            measure_http(load, rounds=1, new_tokens=6, streams=[2], prefix_words=50, seed=1)
            load.close()
            prompts = [request["messages"][0]["content"] for request in server.requests[1:]]
        beginnings += {prompt.split()[0] for prompt in prompts}
    assert len(beginnings) == len(set(beginnings)) > 10


def test_a_new_prompt_that_came_from_a_cache_has_no_cold_figure() -> None:
    for cached, is_cold in ((4, True), (40, False)):
        frames = [text_frame("Once "), text_frame("more"), *end_frames(50, 6, cached)]
        with scripted_server(lambda _, frames=frames: frames) as server:
            load = HttpLoad(server.address, "m")
            found = measure_http(load, rounds=1, new_tokens=6, streams=[], prefix_words=9, seed=1)
            load.close()
        names = [outcome.workload for outcome in found if isinstance(outcome, Measurement)]
        reasons = [outcome.reason for outcome in found if isinstance(outcome, NotRun)]
        assert any("cold" in name for name in names) == is_cold
        assert any("40 of 50 tokens of a new prompt" in each for each in reasons) != is_cold


class _ScriptedLoad(HttpLoad):
    """Every stream begins at 0; neighbours end at `neighbours_end`, the long prompt's first
    token comes at 5."""

    def __init__(self, neighbours_end: float) -> None:
        super().__init__("http://localhost", "m")
        self._neighbours_end = neighbours_end

    def ask(self, content, max_tokens, *, on_text=None) -> Reply:
        if on_text:
            on_text()
        times = (1.0, 1.5, self._neighbours_end) if on_text else (5.0,)
        return Reply(started=0.0, times=times, prompt_tokens=9, completion_tokens=3)


def test_the_longest_gap_is_the_neighbours_own() -> None:
    load = _ScriptedLoad(neighbours_end=8.0)
    assert _worst_gap(load, Random(0), 6, 50) == pytest.approx(6500.0)
    load.close()


def test_neighbours_that_end_before_the_long_prompt_is_read_give_no_gap() -> None:
    load = _ScriptedLoad(neighbours_end=4.0)
    with pytest.raises(DidNotRun, match="ended before"):
        _worst_gap(load, Random(0), 6, 50)
    load.close()
