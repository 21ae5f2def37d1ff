"""Proves how a peer is driven: one process, equal prompts, and plain words when it is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from osaurus.bench import peers
from osaurus.bench.peers import Peer
from osaurus.bench.workloads import DidNotRun, Workload
from osaurus.errors import UserError

DECODE = Workload(kind="decode", prompt_tokens=2, new_tokens=3, streams=2)

_ECHO = """
import json, sys
print(json.dumps({"version": sys.argv[1]}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if work["new_tokens"] == 99:
        sys.exit(3)
    rate = len(work["prompts"]) * 10.0
    print(json.dumps({"ttft_s": 0.5, "tokens_per_s": rate, "rss_bytes": 7}), flush=True)
"""


@pytest.fixture(autouse=True)
def echo_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(_ECHO)
    monkeypatch.setattr(peers, "PEERS", {"echo": (str(script), ("json",))})


def test_a_peer_tells_its_facts_then_answers_workload_by_workload() -> None:
    with Peer("echo", Path("model.gguf")) as peer:
        assert peer.facts == {"version": "model.gguf"}
        for _ in range(2):
            sample = peer.run_once(DECODE, [[1, 2], [3, 4]])
            assert (sample.ttft_s, sample.tokens_per_s) == (0.5, 20.0)
        assert peer.rss_bytes == 7
        process = peer._process
    assert process.returncode == 0


def test_a_peer_computes_on_as_many_threads_as_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "threads.py"
    script.write_text(
        "import json, os\nprint(json.dumps(os.environ.get('OMP_NUM_THREADS')), flush=True)\n"
    )
    monkeypatch.setattr(peers, "PEERS", {"threads": (str(script), ("json",))})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for threads, told in ((3, "3"), (None, None)):
        with Peer("threads", Path("m"), threads=threads) as peer:
            assert peer.facts == told


def test_a_peer_that_dies_did_not_run() -> None:
    dying = Workload(kind="decode", prompt_tokens=1, new_tokens=99)
    with Peer("echo", Path("m")) as peer:
        with pytest.raises(DidNotRun, match="echo process"):
            peer.run_once(dying, [[1]])
        with pytest.raises(DidNotRun, match="echo process"):
            peer.run_once(DECODE, [[1], [2]])


def test_a_peer_that_cannot_start_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(4)")
    monkeypatch.setattr(peers, "PEERS", {"broken": (str(script), ())})
    with pytest.raises(DidNotRun, match="broken process ended"):
        Peer("broken", Path("m"))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "not one of"),
        ({"echo": ("x.py", ("no_such_package",))}, "pip install no_such_package"),
        ({"echo": ("x.py", ())}, "x.py is missing"),
    ],
)
def test_a_peer_that_is_not_to_be_had_is_said_with_the_remedy(
    table: dict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", table)
    with pytest.raises(UserError, match=words):
        Peer("echo", Path("m"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_and_transformers_are_measured_in_one_run(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "osaurus", "bench", "default", "--peer", "transformers"),
            *("--prefill", "64", "--decode", "8", "--streams", "1,2"),
            *("--repeats", "1", "--warmup", "0", "--output", str(report)),
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "decode 2 streams" in done.stdout
    data = json.loads(report.read_text())
    assert [subject["name"] for subject in data["subjects"]] == ["osaurus", "transformers"]
    for subject in data["subjects"]:
        assert len(subject["results"]) == 6
        assert all(row["ran"] and row["median"] > 0 for row in subject["results"])
